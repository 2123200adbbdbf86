//! Printing for people and scripts. `println!` and `eprintln!` panic when nobody reads any more, as in
//! `skysail status | head -1`; here that is an error which leads to a quiet end.

use std::{
    fmt::Display,
    io::{self, Write as _},
};

/// Standard output takes no more.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct PrintError(#[from] io::Error);

impl PrintError {
    /// Whether the reader has left, as `head` does when it has seen enough. Nobody need be told.
    pub fn reader_left(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints a text and a line break on standard output.
///
/// # Errors
/// When standard output is closed or full.
pub fn print(text: impl Display) -> Result<(), PrintError> {
    write(format!("{text}\n").as_bytes())
}

/// Writes bytes to standard output as they are.
///
/// # Errors
/// When standard output is closed or full.
pub fn write(bytes: &[u8]) -> Result<(), PrintError> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}

/// Prints a text and a line break on standard error.
pub fn tell(text: impl Display) {
    // There is no place left to say that standard error is closed.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}
