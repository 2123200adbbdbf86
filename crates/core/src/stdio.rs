//! Printing for people and scripts. `println!` and `eprintln!` panic when the reader has closed the pipe, as in
//! `skysail status | head -1`. Here that is an error, and the program ends without a message.

use std::{
    fmt::Display,
    io::{self, Write as _},
};

/// Error from writing to standard output.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct PrintError(#[from] io::Error);

impl PrintError {
    /// Returns whether the reader has closed the pipe, as `head` does after its last line. No message is needed then.
    pub fn reader_left(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints a text and a line break on standard output.
///
/// # Errors
/// Fails if standard output is closed or full.
pub fn print(text: impl Display) -> Result<(), PrintError> {
    write(format!("{text}\n").as_bytes())
}

/// Writes bytes to standard output unchanged.
///
/// # Errors
/// Fails if standard output is closed or full.
pub fn write(bytes: &[u8]) -> Result<(), PrintError> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}

/// Prints a text and a line break on standard error.
pub fn print_error(text: impl Display) {
    // A failure cannot be reported: standard error is closed.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}
