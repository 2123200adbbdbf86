//! Exit codes of all subcommands; `docs/scripting.md` has the same table.

use skysail_core::stdio::PrintError;

/// Success.
pub(crate) const OK: u8 = 0;
/// The outcome is bad, such as an unhealthy mesh.
pub(crate) const BAD: u8 = 1;
/// Error. clap uses the same code for wrong usage.
pub(crate) const NOT_DONE: u8 = 2;
/// `exec`, as in shells: the command exists and cannot be run, or does not exist.
pub(crate) const CANNOT_RUN: u8 = 126;
pub(crate) const NOT_FOUND: u8 = 127;
/// Exit code that a shell reports for a program ended by SIGPIPE: 128 plus the signal's number.
pub(crate) const READER_LEFT: u8 = 141;

/// Text for `skysail --help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0    success
  1    failure: an unhealthy mesh, a pod that is not ready or was removed, a request or a
       measurement that failed
  2    error: wrong usage, an object that does not exist, or a feature that this machine lacks
  141  the reader of the output closed it
`exec` ends with the exit code of its command, or with 126 or 127 if that cannot be run or found.";

/// Returns the code for a good or bad result.
pub(crate) fn of(good: bool) -> u8 {
    if good { OK } else { BAD }
}

/// Returns the code for an error that ended a subcommand.
pub(crate) fn of_error(error: &anyhow::Error) -> u8 {
    let printing = error.chain().find_map(|cause| cause.downcast_ref::<PrintError>());
    if printing.is_some_and(PrintError::reader_left) { READER_LEFT } else { NOT_DONE }
}
