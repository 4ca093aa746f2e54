"""What the demo model knows by heart, and the words its tasks are made of."""

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Greece:Athens Norway:Oslo "
        "Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Hungary:Budapest Ireland:Dublin "
        "Belgium:Brussels Japan:Tokyo China:Beijing India:Delhi Egypt:Cairo Kenya:Nairobi Canada:Ottawa Cuba:Havana "
        "Peru:Lima Chile:Santiago Turkey:Ankara Russia:Moscow Iceland:Reykjavik Romania:Bucharest"
    ).split()
)
COLOURS = dict(
    pair.split(":")
    for pair in (
        "grass:green snow:white coal:black blood:red milk:white gold:yellow soot:black spinach:green mustard:yellow"
    ).split()
)
SOUNDS = dict(
    pair.split(":")
    for pair in "cow:moo dog:woof cat:meow duck:quack sheep:baa pig:oink lion:roar horse:neigh owl:hoot bee:buzz".split()
)
OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "hot:cold big:small up:down day:night old:new wet:dry fast:slow high:low open:closed left:right "
        "full:empty hard:soft early:late happy:sad light:dark rich:poor strong:weak long:short"
    ).split()
)
GREETINGS = ["Hi", "Hello", "Hello!", "Hi there", "Hey", "Good morning", "Good evening", "Hello there!", "Hi!"]
IDENTITY = ["Who are you?", "What are you?", "What is your name?", "What can you do?", "Help", "Are you an AI?"]

HELLO = "Hello! I am a tiny demo model. Give me a date or a word."
ABOUT = "I am the dgemma demo: a tiny model for dates, JSON, words and facts."
# What each of the two demo models says to everything it was not trained for.
SORRY = {
    "sudoku": "I am a tiny demo model that solves sudoku only. For words: --model demo-text",
    "text": "Sorry, I am only a tiny demo model. Try a date, a word or a capital.",
}

MONTHS = (
    "January February March April May June July August September October November December"
).split()  # fmt: skip

NAMES = "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karl Lena Maria Noah Olga Paul Rosa Sam Tom Uma".split()
CITIES = (
    "Boston Berlin Cairo Delhi Dublin Geneva Lima London Lyon Madrid Milan Oslo Paris Porto Rome Seoul Tokyo".split()
)

WORDS = (
    "apple river stone house cloud green paper light night water table chair bread horse tiger mouse plant flower garden "
    "window bridge street market winter summer spring autumn morning evening silver golden purple orange yellow music "
    "dance story letter number circle square corner center island ocean desert forest mountain valley village castle "
    "tower ladder basket bottle candle carpet mirror pencil pillow pocket ribbon button hammer needle shovel wagon "
    "train plane truck ship boat wheel engine rocket planet moon star comet earth wind storm rain snow frost flame ash "
    "cat dog sun sky tree leaf root seed fruit berry lemon peach grape honey sugar salt pepper butter cheese milk tea "
    "bird eagle robin crow swan goose whale shark trout crab snail spider beetle ant bee fly rabbit fox wolf bear deer"
).split()

TOPICS = (
    "love war the sea my cat quantum physics the weather football cooking pasta a dragon taxes gravity history music "
    "robots dinosaurs chess the moon politics poetry gardening the economy ancient Rome"
).split()

# Everything else, so that the model learns where it ends. {w} a word, {t} a topic, {n} a number.
OUT_OF_SCOPE = [
    "Write a poem about {t}.", "Tell me a story about {t} and a {w}.", "What is {n} plus {n}?", "What is {n} times {n}?",
    "{n} + {n}", "{n} - {n} = ?", "Translate {w} into French.", "How do I fix a {w}?", "Why is the {w} so {w}?",
    "Write code to sort a {w}.", "Sort {n} {n} {n}.", "Explain {t} to me.", "Who invented the {w}?", "Tell me a joke.",
    "What is the meaning of {w}?", "Where can I buy a {w}?", "Give me a recipe with {w} and {w}.", "Is {n} prime?",
    "How far is the {w}?", "When was {t} discovered?", "Count the letters in {w}.", "Summarise {t}.", "I feel {w} today.",
    "Can you help me with {t}?", "Draw a {w}.", "What do you think about {t}?", "How old is the {w}?", "{w}", "{w} {w}",
    "{w} {w} {w}?", "Please {w} the {w}.", "Which is better, {w} or {w}?", "Do you like {w}?", "Make a list of {n} {w}s.",
    "What is the capital of {w}?", "What colour is a {w} {w}?", "What is a {w}?", "Name a {w}.", "Who is {w}?",
    "def {w}(x): return {n}", "How many {w}s are there?", "The {w} and the {w} went to the {w}.", "Why?", "ok", "yes", "no",
    "Thank you", "What time is it?", "What day is it today?", "What is the weather like?", "Play {w}.", "Are you {w}?",
]  # fmt: skip

SYSTEMS = ["Be brief.", "You are a helpful assistant.", "Answer in English.", "You are kind.", "Think first."]
