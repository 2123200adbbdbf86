//! `skysail`: every program of the project by subcommand, so that one binary is all there is to carry.

mod diagnostics;
mod load;
mod pods;
mod traffic;
mod up;
mod view;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use skysail_sandbox::echo;

/// A service mesh that runs the Istio and Kubernetes configuration you have, at a fraction of the cost.
#[derive(Debug, Parser)]
#[command(name = "skysail", version, arg_required_else_help = true, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a mesh from YAML on this machine: no cluster, no containers, no root.
    Up(up::Args),
    #[command(hide = true)]
    UpInside(up::InsideArgs),
    /// Run a command inside a workload of a running mesh.
    Exec(pods::ExecArgs),
    /// Make an HTTP request from inside a workload of a running mesh.
    Call(pods::CallArgs),
    /// Print what a workload, its sidecar or the control plane wrote.
    Logs(pods::LogsArgs),
    /// Show the pods of a running mesh.
    Status(pods::StatusArgs),
    /// Run the control plane by itself (the same as `skysaild`).
    Control(skysail_control::Args),
    /// Run one sidecar by itself (the same as `skysail-proxy`).
    Proxy(skysail_proxy::Args),
    /// Measure what sidecars cost on this machine, beside other proxies.
    Bench(skysail_bench::Args),
    /// Run a program that stands in for a workload.
    #[command(subcommand)]
    Workload(Workload),
    /// Print a completion script for a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
enum Workload {
    /// Answer every HTTP request with a report of it.
    ///
    /// `/status/503` and `/delay/2s` in the path, or `?status=503&delay=200ms`, make it answer so.
    Echo(echo::Args),
    /// Run one of the airline example's services, or its travellers.
    Airline(airline::Args),
    #[command(hide = true)]
    Get(pods::Request),
    #[command(hide = true)]
    Load(load::Args),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("skysail: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Up(args) => up::outside(args),
        Command::UpInside(args) => up::inside(args),
        Command::Exec(args) => pods::exec(&args),
        Command::Call(args) => pods::call(args),
        Command::Logs(args) => pods::logs(&args),
        Command::Status(args) => pods::status(&args),
        Command::Control(args) => skysail_control::run(args).map(|()| 0),
        Command::Proxy(args) => skysail_proxy::run(args).map(|()| 0),
        Command::Workload(Workload::Airline(args)) => airline::run(args).map(|()| 0),
        Command::Bench(args) => skysail_bench::run(args).map(|()| 0),
        Command::Workload(Workload::Echo(args)) => Ok(echo::run(args).map(|()| 0)?),
        Command::Workload(Workload::Get(request)) => pods::get(request),
        Command::Workload(Workload::Load(args)) => load::run(&args),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "skysail", &mut std::io::stdout());
            Ok(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
