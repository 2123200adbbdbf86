//! `skysail load`: a load generator with the flags and results of Fortio.
//!
//! [`run`](mod@run) starts the threads and prints the result; [`drive`](mod@drive) measures for another program. Two
//! engines send requests: [`engine`] for HTTP/1 and TCP, [`streams`] for HTTP/2 and gRPC. [`pace`] computes due times,
//! [`tally`] collects the measurements, and [`result`] writes them in Fortio's format.

// The standard macros panic when the reader closes the output; `skysail_core::stdio` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod drive;
mod report;
mod ui;

mod run;
pub mod server;
// Modules use those listed below them.
mod engine;
mod streams;

mod window;

mod text;

mod result;

mod target;
mod worker;

mod args;
pub mod grpc;

mod pace;
pub mod response;
mod tally;

pub mod clock;
pub mod go;
pub mod http1;
pub mod stream;

use std::ffi::OsString;

pub use self::{
    args::LoadArgs,
    drive::{WindowOutcome, drive},
    window::WindowBoundary,
};

/// Further commands of `skysail load`.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum LoadCommand {
    /// Run echo servers for HTTP/1, HTTP/2, gRPC and TCP. `?delay=2ms:10&status=503:5&size=1024&close=true` in a URL
    /// sets how to respond, and to what percentage of the requests.
    Server(server::ServerArgs),
    /// Show results of `skysail load` and of Fortio side by side.
    Report(report::ReportArgs),
    /// Serve a page on this machine that runs loads and compares results, with Fortio's REST calls.
    Ui(ui::UiArgs),
}

/// Runs `skysail load`. Returns true if every request succeeded.
///
/// # Errors
/// The target cannot be reached, or the result cannot be written.
pub fn run(args: &LoadArgs) -> anyhow::Result<bool> {
    skysail_core::descriptors::raise();
    match &args.command {
        Some(LoadCommand::Server(args)) => server::run(args).map(|()| true),
        Some(LoadCommand::Report(args)) => report::run(args).map(|()| true),
        Some(LoadCommand::Ui(args)) => ui::serve(args).map(|()| true),
        None => run::run(args),
    }
}

/// Adds the second dash to the long flags of `skysail load`, which Fortio writes with one. `command` is that of
/// `skysail load`.
pub fn accept_single_dashes(arguments: Vec<OsString>, command: &clap::Command) -> Vec<OsString> {
    go::double_dashes(arguments, command)
}

#[cfg(test)]
mod tests;
