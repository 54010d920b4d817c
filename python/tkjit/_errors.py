"""The exceptions of tkjit. Wrong arguments are TypeError, ValueError, IndexError or RuntimeError, as torch raises them."""

from __future__ import annotations


class Error(RuntimeError):
    """Base of everything that tkjit raises of its own."""


class DeviceError(Error):
    """No driver, no compiler, no such GPU: says what was looked for and what to install."""


class LaunchError(Error):
    """The driver refused a kernel: names the kernel, its grid, block and shared memory, and the device's limits."""


class EmulatorError(Error):
    """A kernel that ran on the CPU did what it must not: says what, which threads, and the lines of the kernel's text."""


class CompileError(Error):
    """A kernel did not compile.

    Attributes:
        name: The template, or the user's name for the source.
        expression: The instance that was asked for, such as ``softmax::fwd<float, 256>``.
        arch: The architecture it was compiled for.
        options: The compiler's options.
        log: All that the compiler said.
        source: The text that was compiled.
        reproducer: Path of a file with source, options and log, or None.
    """

    def __init__(
        self,
        message: str,
        name: str | None = None,
        expression: str | None = None,
        arch: str | None = None,
        options: tuple[str, ...] = (),
        log: str = "",
        source: str = "",
        reproducer: str | None = None,
    ):
        super().__init__(message)
        self.name = name
        self.expression = expression
        self.arch = arch
        self.options = options
        self.log = log
        self.source = source
        self.reproducer = reproducer

    def __reduce__(self):
        fields = (self.name, self.expression, self.arch, self.options, self.log, self.source, self.reproducer)
        return (type(self), (str(self), *fields))
