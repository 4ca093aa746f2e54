"""What a user can run into, each with its cure and an exit code of its own.

    DgemmaError                     1   (never raised itself)
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
    └── RecordingError             15   a file that is no recording, or one that cannot be written or exported

    130 after Ctrl-C, 141 when the reader of stdout has gone (as `cat` would report it).

Raised where the fact is known, shown once, in `cli.main`, as two lines: what, and `fix:` how.
"""

from typing import ClassVar

INTERRUPTED = 130
BROKEN_PIPE = 141


class DgemmaError(Exception):
    """Something a user can act on: `what` is wrong, and the `fix`; `exit_code` is the process's."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


class UsageError(DgemmaError):
    """Flags that contradict each other, or a value outside its range."""

    exit_code = 2


class PromptError(DgemmaError):
    """The prompt cannot be read, is blank, or does not fit the context."""

    exit_code = 3


class UnknownModel(DgemmaError):
    """No model of that name, and no folder either."""

    exit_code = 4


class ConfigError(DgemmaError):
    """config.json or generation_config.json cannot be used."""

    exit_code = 5


class CheckpointError(DgemmaError):
    """The tensors on disk are not the tensors of this model."""

    exit_code = 6


class TokenizerError(DgemmaError):
    """tokenizer.json or chat_template.jinja cannot be used."""

    exit_code = 7


class NumericalError(DgemmaError):
    """A denoising step produced NaN or infinity."""

    exit_code = 8


class EmptyAnswer(DgemmaError):
    """Generation ended, and not one token of it is for the reader."""

    exit_code = 9


class FetchError(DgemmaError):
    """A model's files cannot be brought here. What has arrived is kept, and the next attempt goes on from there."""

    exit_code = 10


class DoesNotFit(DgemmaError):
    """The plan needs more memory than there is; nothing was loaded."""

    exit_code = 11


class KernelCrash(DgemmaError):
    """A kernel ended the process's CUDA context in its self-test; nothing can run on the card in this process any more."""

    exit_code = 12


class BenchRefused(DgemmaError):
    """A benchmark shows no speed: a kernel's self-test failed, two runs of one seed differ, or a protocol was not kept."""

    exit_code = 13


class EndpointError(DgemmaError):
    """A server to compare with is not there, refuses, or does not answer as vLLM does."""

    exit_code = 14


class RecordingError(DgemmaError):
    """A file is no recording, or one cannot be written, or what is in it cannot be exported as asked."""

    exit_code = 15
