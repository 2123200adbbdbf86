//! What exit codes mean, in one place for all subcommands; `docs/scripting.md` has the same table.

use skysail_core::stdio::PrintError;

/// It was done, and all is well.
pub(crate) const OK: u8 = 0;
/// It was done, and what came of it is bad.
pub(crate) const BAD: u8 = 1;
/// It could not be done. clap ends with the same for wrong usage.
pub(crate) const NOT_DONE: u8 = 2;
/// `exec`, as in shells: the command is there and cannot be run, or is not there.
pub(crate) const CANNOT_RUN: u8 = 126;
pub(crate) const NOT_FOUND: u8 = 127;
/// What a shell reports of a program that SIGPIPE ended: 128 and the signal's number.
pub(crate) const READER_LEFT: u8 = 141;

/// For `skysail --help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0    done, and all is well
  1    done, and the outcome is bad: an unhealthy mesh, a pod that is not ready or gone,
       a request or a measurement that failed
  2    not done: wrong usage, nothing to work on, or something this machine does not give
  141  whoever read the output closed it
`exec` ends as its command does, and with 126 or 127 if that cannot be run or is not there.";

/// The code for a result that is good or bad.
pub(crate) fn of(good: bool) -> u8 {
    if good { OK } else { BAD }
}

/// The code for an error that ended a subcommand.
pub(crate) fn of_error(error: &anyhow::Error) -> u8 {
    let printing = error.chain().find_map(|cause| cause.downcast_ref::<PrintError>());
    if printing.is_some_and(PrintError::reader_left) { READER_LEFT } else { NOT_DONE }
}
