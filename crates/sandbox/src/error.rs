//! Errors of the sandbox: the failed action, its cause, and the remedy if the machine lacks something.

use std::{fmt::Display, io};

/// Error of the sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine lacks or forbids something that the sandbox needs.
    #[error("cannot set up {what}: {cause}. {remedy}")]
    Missing {
        /// Name of the missing thing.
        what: &'static str,
        /// Remedy.
        remedy: String,
        /// Error of the kernel.
        cause: io::Error,
    },
    /// A system call failed unexpectedly.
    #[error("{what}: {cause}")]
    System {
        /// Action that failed.
        what: String,
        /// Error of the kernel.
        cause: io::Error,
    },
    /// The command for a pod cannot be run.
    #[error("cannot run {program}: {cause}")]
    Command {
        /// First word of the command.
        program: String,
        /// Error of the kernel.
        cause: io::Error,
    },
    /// The request is invalid in the present state.
    #[error("{0}")]
    Refused(String),
}

/// Adds the failed action to an error.
pub(crate) trait Context<T> {
    /// Converts the error to [`Error::System`].
    fn context(self, what: impl Display) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl Display) -> Result<T, Error> {
        self.map_err(|error| Error::System { what: what.to_string(), cause: error.into() })
    }
}
