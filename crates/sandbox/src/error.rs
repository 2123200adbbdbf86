//! What can keep a mesh from running on this machine, said so that one can act on it.

use std::{fmt::Display, io};

/// Why the sandbox cannot do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine lacks, or forbids, something the sandbox needs.
    #[error("cannot set up {what}: {cause}. {remedy}")]
    Missing {
        /// The thing.
        what: &'static str,
        /// How to get it.
        remedy: String,
        /// What the kernel said.
        cause: io::Error,
    },
    /// A system call failed that has no reason to.
    #[error("{what}: {cause}")]
    System {
        /// What was being done.
        what: String,
        /// What the kernel said.
        cause: io::Error,
    },
    /// The command that was to run in a pod cannot be run.
    #[error("cannot run {program}: {cause}")]
    Command {
        /// The command's first word.
        program: String,
        /// What the kernel said.
        cause: io::Error,
    },
    /// The request makes no sense in this state.
    #[error("{0}")]
    Refused(String),
}

/// Says what was being done when something failed.
pub(crate) trait Context<T> {
    /// Turns the error into [`Error::System`].
    fn context(self, what: impl Display) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl Display) -> Result<T, Error> {
        self.map_err(|error| Error::System { what: what.to_string(), cause: error.into() })
    }
}
