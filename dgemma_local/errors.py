"""What a user can run into, each with its cure and an exit code of its own.

    DgemmaError                     1   itself only for what the system refuses: output, or another file
    ├── UsageError                  2   flags that contradict each other, or mean nothing here
    ├── PromptError                 3   no file, nothing in it, not text, longer than the context
    ├── UnknownModel                4   no such name in models.toml, no such folder
    ├── ConfigError                 5   config.json or generation_config.json: absent, broken, not this architecture
    ├── CheckpointError             6   safetensors: truncated, missing, extra or misshapen tensors
    ├── TokenizerError              7   tokenizer.json or chat template: absent, broken, without a needed token
    ├── NumericalError              8   NaN or infinity in a denoising step
    ├── EmptyAnswer                 9   the model finished without a token for the reader
    ├── FetchError                 10   a download: no network, no such repository, disk full, a damaged file
    ├── DoesNotFit                 11   the plan needs more memory than there is
    ├── KernelCrash                12   a kernel ended the CUDA context in its self-test
    ├── BenchRefused               13   a benchmark whose figures would mean nothing: a failed self-test, runs that differ
    ├── EndpointError              14   a server to compare with does not answer as vLLM does
    ├── RecordingError             15   a file that is no recording, or one that cannot be written or exported
    ├── ThoughtOnly                16   the model finished, and all of it is thought
    └── InstallationError          20   a package that this needs cannot be imported

    17 an answer that was cut at a limit, 18 one with canvases that did not converge (`outcomes`): there is text, no error.
    19 `doctor` found something broken.
    130 after Ctrl-C, 141 when the reader of stdout has gone (as `cat` would report it).

Raised where the fact is known, shown once, in `cli.main`, as two lines: what, and `fix:` how.
"""

from typing import ClassVar

TOKEN_LIMIT = 17
NOT_CONVERGED = 18
CHECK_FAILED = 19
HUNG_UP = 129
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143


class DgemmaError(Exception):
    """Something a user can act on: `what` is wrong, and the `fix`; `exit_code` is the process's.

    Of its class, whatever the occasion: `word` in a list of exit codes, what the code `means`, the usual `why`, the `cure`.
    """

    exit_code: ClassVar[int] = 1
    word: ClassVar[str] = "output"
    means: ClassVar[str] = "the output could not be written, or another file not read or written"
    why: ClassVar[str] = "a disk that is full, or fails"
    cure: ClassVar[str] = "make room, write elsewhere, or see to the file that is named"

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


class UsageError(DgemmaError):
    """Flags that contradict each other, or a value outside its range."""

    exit_code = 2
    word = "flags"
    means = "flags or settings that contradict each other, mean nothing here, or are out of range"
    why = "a flag without the one it acts on, two that exclude each other, a mistyped DGEMMA_ variable"
    cure = "`--help` of the command says what goes with what; `dgemma config` what is set and where"


class PromptError(DgemmaError):
    """The prompt cannot be read, is blank, or does not fit the context."""

    exit_code = 3
    word = "prompt"
    means = "the prompt: no file, blank, not UTF-8, longer than the context"
    why = "a mistyped file name, an empty pipe, a binary file, a long document"
    cure = "check the file, shorten it, or raise `--context`"


class UnknownModel(DgemmaError):
    """No model of that name, and no folder either."""

    exit_code = 4
    word = "no such model"
    means = "no model of that name, no such folder"
    why = "a mistyped name, or a model that was not fetched"
    cure = "`dgemma models` lists the names, `dgemma pull NAME` fetches one"


class ConfigError(DgemmaError):
    """config.json or generation_config.json cannot be used."""

    exit_code = 5
    word = "configuration"
    means = "config.json, generation_config.json, models.toml or config.toml: absent, broken, another architecture"
    why = "an incomplete or edited checkpoint, another kind of model, a mistyped key"
    cure = "use the checkpoint's own files; correct the line that is named; `dgemma config --path` says where yours is"


class CheckpointError(DgemmaError):
    """The tensors on disk are not the tensors of this model."""

    exit_code = 6
    word = "weights"
    means = "safetensors: truncated, a shard missing, extra or misshapen tensors"
    why = "a copy that was cut short, or files of two checkpoints in one folder"
    cure = "`dgemma pull --verify NAME` fetches damaged files again"


class TokenizerError(DgemmaError):
    """tokenizer.json or chat_template.jinja cannot be used."""

    exit_code = 7
    word = "tokenizer"
    means = "tokenizer.json or chat template: absent, broken, without a needed token"
    why = "files left out when a folder was copied, or another model's"
    cure = "copy tokenizer.json and chat_template.jinja of the same checkpoint"


class NumericalError(DgemmaError):
    """A denoising step produced NaN or infinity."""

    exit_code = 8
    word = "NaN"
    means = "NaN or infinity in a denoising step"
    why = "damaged weights, or a kernel that is wrong on this card"
    cure = "`--dtype float32` tells rounding from damaged weights, `dgemma pull --verify` mends those, `DGEMMA_OPS=torch` leaves kernels out"


class EmptyAnswer(DgemmaError):
    """Generation ended, and not one token of it is for the reader."""

    exit_code = 9
    word = "no answer"
    means = "generation ended without a token for the reader"
    why = "a request for a word or a number alone; a stop string at the beginning"
    cure = "ask for a whole sentence, or give another `--seed`"


class FetchError(DgemmaError):
    """A model's files cannot be brought here. What has arrived is kept, and the next attempt goes on from there."""

    exit_code = 10
    word = "download"
    means = "a download: no network, no such repository, disk full, a damaged file"
    why = "being offline, a gated repository, too little space"
    cure = "the same command goes on where it stopped; HF_TOKEN opens gated repositories, HF_HOME moves the cache"


class DoesNotFit(DgemmaError):
    """The plan needs more memory than there is; nothing was loaded."""

    exit_code = 11
    word = "memory"
    means = "the memory plan does not fit: `run` before it loads, `pull` before it fetches, `models show`"
    why = "a checkpoint larger than the card, a long context, another process on the card"
    cure = "a smaller checkpoint, `--fp8-attention`, a shorter `--context`, or end the process that is named"


class KernelCrash(DgemmaError):
    """A kernel ended the process's CUDA context in its self-test; nothing can run on the card in this process any more."""

    exit_code = 12
    word = "kernel crash"
    means = "a kernel crashed the card's context in its self-test"
    why = "a driver, compiler or card that the kernel was never tried on"
    cure = "`DGEMMA_OPS=twins`, the kernels' torch twins in their place, or `DGEMMA_OPS=torch`; then report it"


class BenchRefused(DgemmaError):
    """A benchmark shows no speed: a kernel's self-test failed, two runs of one seed differ, or a protocol was not kept."""

    exit_code = 13
    word = "bench"
    means = "`bench`: figures that would mean nothing, of a kernel that failed its self-test or runs that differ"
    why = "a kernel that is wrong on this card, a run that cannot be repeated"
    cure = "`dgemma run --verbose` names the kernel; measure without it by `DGEMMA_OPS`"


class EndpointError(DgemmaError):
    """A server to compare with is not there, refuses, or does not answer as vLLM does."""

    exit_code = 14
    word = "bench server"
    means = "`bench --against`: a server that does not answer as vLLM does"
    why = "a wrong address, a server still loading, another protocol"
    cure = "check the address and the server's log"


class RecordingError(DgemmaError):
    """A file is no recording, or one cannot be written, or what is in it cannot be exported as asked."""

    exit_code = 15
    word = "recording"
    means = "a file that is no recording, one that cannot be written, or cannot be exported as asked"
    why = "another file, a disk that is full, Pillow not installed"
    cure = "give what `--record` wrote; `pip install 'dgemma[gif]'` for GIF and PNG"


class ThoughtOnly(DgemmaError):
    """Generation ended, and all of it is thought."""

    exit_code = 16
    word = "thought only"
    means = "generation ended, and all of it is thought"
    why = "a question that takes longer to think over than `--max-tokens` lasts"
    cure = "raise `--max-tokens`, give `--think-tokens N`, or leave `--think` out"


class InstallationError(DgemmaError):
    """A package that everything needs is broken."""

    exit_code = 20
    word = "installation"
    means = "a package that this needs cannot be imported"
    why = "an installation that broke off, a torch for another driver or Python"
    cure = "`dgemma doctor` says which and how"


# How a process ends where nothing went wrong with the program: code, what it means, why, what to do about it.
ENDINGS = (
    (0, "an answer was given", "", ""),
    (
        TOKEN_LIMIT,
        "the answer was cut at a limit; what there is of it was written",
        "`--max-tokens`, or a full context",
        "raise `--max-tokens`, or `--context`",
    ),
    (
        NOT_CONVERGED,
        "an answer whose canvases did not all converge: the model still doubted",
        "a hard question, or too few steps",
        "raise `--steps`, or give another `--seed`",
    ),
    (
        CHECK_FAILED,
        "`doctor`: something is broken here",
        "a driver, a package or a file that is missing or damaged",
        "each FAIL line says how",
    ),
    (HUNG_UP, "the terminal has gone", "a window that was closed", ""),
    (INTERRUPTED, "Ctrl-C; what was committed stays on screen", "", ""),
    (BROKEN_PIPE, "the reader of stdout has gone", "`head`, or a pager that was left", ""),
    (TERMINATED, "terminated", "a kill, or a session that ended", ""),
)


OTHER_WORDS = {
    0: "done",
    TOKEN_LIMIT: "cut at a limit",
    NOT_CONVERGED: "not converged",
    CHECK_FAILED: "doctor",
    HUNG_UP: "hung up",
    INTERRUPTED: "Ctrl-C",
    BROKEN_PIPE: "closed pipe",
    TERMINATED: "terminated",
}


def kinds() -> tuple[type[DgemmaError], ...]:
    """Every kind of error, by exit code."""
    return tuple(sorted((DgemmaError, *DgemmaError.__subclasses__()), key=lambda kind: kind.exit_code))


def table() -> str:
    """All of it as README's table in Markdown, by exit code."""
    rows = [*ENDINGS, *((kind.exit_code, kind.means, kind.why, kind.cure) for kind in kinds())]
    lines = ["| code | what | why, as a rule | cure |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {code} | {' | '.join(rest)} |" for code, *rest in sorted(rows)])
