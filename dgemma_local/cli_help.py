"""What each command's help says behind its options, and which of its options go together: data, read by `cli_page`."""

from collections.abc import Mapping

from dgemma_local.cli_page import Help
from dgemma_local.errors import (
    CHECK_FAILED,
    NOT_CONVERGED,
    TOKEN_LIMIT,
    BenchRefused,
    CheckpointError,
    ConfigError,
    DoesNotFit,
    EmptyAnswer,
    EndpointError,
    FetchError,
    KernelCrash,
    NumericalError,
    PromptError,
    RecordingError,
    ThoughtOnly,
    TokenizerError,
    UnknownModel,
    UsageError,
)

_HUB = "HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, as everywhere."
_LOADING = (UsageError, UnknownModel, ConfigError, CheckpointError, TokenizerError, DoesNotFit, KernelCrash)
_VIEW = "visualize view draft slow step fps theme"
_MEMORY = "model prefer dtype device context vram fp8_attention fp8_embedding fp8_mlp"
_KEPT = "model system seed max_tokens steps preset think think_tokens show_thinking stop"  # with a conversation
_SHOWN_ONLY = dict.fromkeys(("slow", "step", "fps", "view", "draft", "theme"), ("visualize",))

PAGES: Mapping[str, Help] = {
    "run": Help(
        examples=(
            "dgemma run examples/sudoku.txt --visualize --slow 0.2",
            'dgemma run -p "Spell river." -m demo-text',
            "git diff | dgemma run - --system 'Write a commit message.' -m 26b-a4b-nvfp4",
            "dgemma run question.txt --json --seed 7",
        ),
        output="the answer alone goes to stdout and ends in one newline; seed, thoughts and notices go to stderr.",
        errors=(*_LOADING, PromptError, NumericalError, EmptyAnswer, RecordingError, ThoughtOnly),
        endings=(TOKEN_LIMIT, NOT_CONVERGED),
        environment="DGEMMA_OPS chooses how operations run (torch, twins, eager …), CUDA_VISIBLE_DEVICES the card, "
        "NO_COLOR and TERM how the view looks, DGEMMA_LOG a file for what -v says.",
        panels={
            "The question": "prompt system stop",
            "The model, and the memory it may take": _MEMORY,
            "How it answers": "seed max_tokens steps preset think think_tokens",
            "What is written": "as_json stats quiet verbose show_thinking record_to no_prompt",
            "The canvas in view": _VIEW,
        },
        exclusive=(
            ("as_json", "visualize"),
            ("quiet", "visualize"),
            ("quiet", "stats"),
            ("quiet", "verbose"),
            ("quiet", "show_thinking"),
            ("as_json", "show_thinking"),
            ("model", "prefer"),
        ),
        yields=(("steps", "preset"),),
        needs={**_SHOWN_ONLY, "no_prompt": ("record_to",), "think_tokens": ("think",)},
        terminal=("visualize", "step"),
        less=(("think_tokens", "max_tokens"),),
        at_most=("context",),
    ),
    "chat": Help(
        examples=(
            "dgemma chat",
            "dgemma chat -m 26b-a4b-nvfp4 --think",
            "dgemma chat --resume",
            "printf 'Spell river.\\n' | dgemma chat -m demo-text",
        ),
        output="the conversation goes to the terminal; where stdin is none, a line is a message and the answers alone go to stdout.",
        errors=(*_LOADING, PromptError, NumericalError, EmptyAnswer, ThoughtOnly, RecordingError),
        endings=(TOKEN_LIMIT, NOT_CONVERGED),
        environment="EDITOR for /edit; DGEMMA_OPS, CUDA_VISIBLE_DEVICES, NO_COLOR, TERM and DGEMMA_LOG as of run.",
        panels={
            "The conversation": "resume list_all no_save system",
            "The model, and the memory it may take": _MEMORY,
            "How it answers": "seed max_tokens steps preset think think_tokens stop",
            "What is shown": "visualize stats quiet verbose show_thinking",
        },
        exclusive=(("model", "prefer"),),
        needs={"think_tokens": ("think",)},
        less=(("think_tokens", "max_tokens"),),
        at_most=("context",),
        yields=(
            ("steps", "preset"),
            # a conversation that is resumed goes on as it was, unless a flag says otherwise
            *((own, "resume") for own in _KEPT.split()),
        ),
    ),
    "replay": Help(
        examples=(
            "dgemma replay run.jsonl.gz",
            "dgemma replay run.jsonl.gz --export run.html --export run.svg",
            "dgemma replay run.jsonl.gz --position 12",
        ),
        output="the player draws on the terminal; where stdout is none, the answer alone goes to it.",
        errors=(UsageError, RecordingError),
        environment="NO_COLOR, TERM and COLORFGBG, as the terminal sets them.",
        panels={
            "What is looked at": "canvas at position view draft",
            "How it is played": "speed slow theme",
            "Exports": "exports plot width",
        },
        needs={
            "plot": ("exports",),
            "width": ("exports",),
        },
    ),
    "pull": Help(
        examples=("dgemma pull", "dgemma pull 26b-a4b-nvfp4 --verify", "dgemma pull --prefer quality --quiet"),
        output="the folder goes to stdout, progress to stderr.",
        errors=(UsageError, UnknownModel, ConfigError, FetchError, DoesNotFit),
        environment=_HUB,
        panels={"What is fetched": "prefer revision verify anyway"},
    ),
    "bench": Help(
        examples=(
            "dgemma bench",
            "dgemma bench --demo --against transformers",
            "dgemma bench --synthetic 26b --layout nvfp4",
            "dgemma bench -m 26b-a4b-nvfp4 --against http://localhost:8000",
        ),
        output="tables go to stdout, and in the last line the same as one JSON object; progress goes to stderr.",
        errors=(*_LOADING, BenchRefused, EndpointError),
        environment="DGEMMA_OPS, CUDA_VISIBLE_DEVICES.",
        panels={
            "What is measured": "demo model synthetic layout protocol against view",
            "How": "runs context seed fp8_attention fp8_mlp fp8_embedding dtype device",
            "What is written": "json_file quiet",
        },
        exclusive=(
            ("demo", "model"),
            ("demo", "synthetic"),
            ("model", "synthetic"),
            ("dtype", "synthetic"),
            *(
                ("view", other)
                for other in "model synthetic layout protocol against context dtype device fp8_attention fp8_mlp fp8_embedding".split()
            ),
            *(("against", part) for part in ("fp8_attention", "fp8_mlp", "fp8_embedding")),
        ),
        needs={"layout": ("synthetic",)},
        at_most=("context",),
    ),
    "doctor": Help(
        examples=("dgemma doctor", "dgemma doctor --json > doctor.json"),
        output="a line a check goes to stdout: OK, WARN or FAIL, and a cure.",
        errors=(UsageError,),
        endings=(CHECK_FAILED,),
        panels={"What is looked at": "verify", "What is written": "as_json"},
        environment="DGEMMA_OPS, CUDA_VISIBLE_DEVICES, and of the hub " + _HUB,
    ),
    "models list": Help(
        examples=("dgemma models", "dgemma models list"),
        output="the table goes to stdout.",
        errors=(ConfigError,),
        environment=_HUB,
    ),
    "models show": Help(
        examples=("dgemma models show 26b-a4b-nvfp4 --vram 24", "dgemma models show auto --context 65536 --json"),
        output="the plan goes to stdout; exit code 11 where it does not fit.",
        errors=(UsageError, UnknownModel, ConfigError, CheckpointError, FetchError, DoesNotFit),
        environment=_HUB,
        panels={
            "What is planned": "prefer context vram fp8_attention fp8_embedding fp8_mlp",
            "What is written": "as_json",
        },
        at_most=("context",),
    ),
    "models rm": Help(
        examples=("dgemma models rm 26b-a4b-fp8", "dgemma models rm 26b-a4b-fp8 --yes"),
        output="what was removed is said on stderr.",
        errors=(UsageError, UnknownModel, ConfigError),
        environment=_HUB,
    ),
    "config": Help(
        examples=(
            "dgemma config",
            "dgemma config run.steps 24",
            "dgemma config run.steps --unset",
            "dgemma config run.steps",
        ),
        output="values go to stdout, with where they come from; what was set is said on stderr.",
        errors=(UsageError, ConfigError),
        environment="DGEMMA_CONFIG is another file; XDG_CONFIG_HOME another folder.",
    ),
    "completion": Help(
        examples=(
            "source <(dgemma completion bash)  # in this shell, or as a line of .bashrc",
            "dgemma completion zsh > ~/.zfunc/_dgemma",
            "dgemma completion fish > ~/.config/fish/completions/dgemma.fish",
            "dgemma completion powershell >> $PROFILE",
        ),
        output="the script goes to stdout.",
        errors=(UsageError,),
    ),
    "version": Help(examples=("dgemma version", "dgemma --version"), output="one line goes to stdout."),
}
