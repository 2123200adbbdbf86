//! `skysail`: one binary with all programs of the project as subcommands.

// These macros panic when the reader closes the output; `skysail_core::stdio` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod analyze;
mod burst;
mod ca;
mod call;
mod changes;
mod check;
mod console;
mod dashboard;
mod diagnostics;
mod edges;
mod exit;
mod explain;
mod image;
mod inject;
mod input;
mod install;
mod load;
mod pods;
mod port_forward;
mod publish;
mod screen;
mod status;
mod traffic;
mod up;
mod validated;
mod view;
mod workload;

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory as _, Parser, Subcommand};
use skysail_core::stdio;
use skysail_sandbox::echo;

/// A service mesh that runs existing Istio and Kubernetes configuration with less CPU and memory.
#[derive(Debug, Parser)]
#[command(name = "skysail", version, arg_required_else_help = true, max_term_width = 110, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a mesh from YAML on this machine: no cluster, no containers, no root.
    Up(up::UpArgs),
    #[command(hide = true)]
    UpInside(up::InsideArgs),
    #[command(hide = true)]
    UpEgress,
    /// Run a command in a workload's network, inside a running mesh.
    Exec(pods::ExecArgs),
    /// Send an HTTP or gRPC request from a workload of a running mesh.
    Call(call::CallArgs),
    /// Explain where a request goes, and which objects cause that.
    Explain(explain::ExplainArgs),
    /// Forward ports of this machine's loopback to a workload.
    PortForward(port_forward::PortForwardArgs),
    /// Open the admin page of a sidecar or of the control plane in a browser.
    Dashboard(dashboard::DashboardArgs),
    /// Print the logs of a workload, of its sidecar or of the control plane.
    Logs(pods::LogsArgs),
    /// Show the pods of a running mesh, or the status of an object in each proxy.
    Status(status::StatusArgs),
    /// Find mistakes in configuration files, without running them.
    Analyze(analyze::AnalyzeArgs),
    /// Add sidecars to the workloads in files, for a Kubernetes cluster.
    Inject(inject::InjectArgs),
    /// Install a control plane in a Kubernetes cluster, or change an installed one.
    Install(Box<install::InstallArgs>),
    /// Remove a control plane from a Kubernetes cluster.
    Uninstall(install::UninstallArgs),
    /// Look for problems of a control plane and its sidecars in a Kubernetes cluster.
    Check(check::CheckArgs),
    /// Print the definitions (CRDs) of Skysail's own kinds. `skysail install` applies them.
    #[command(after_help = "For example: skysail crds | kubectl apply --server-side -f -")]
    Crds,
    /// Make container images of the programs, without a container engine.
    Image(image::ImageArgs),
    /// Show or rotate the root certificates of the mesh.
    #[command(subcommand)]
    Ca(ca::CaArgs),
    /// Run only a control plane (the same as `skysaild`).
    Control(skysail_control::Args),
    /// Run only a sidecar (the same as `skysail-proxy`).
    Proxy(skysail_proxy::Program),
    /// Measure the cost of sidecars, gateways and the control plane on this machine.
    Bench(skysail_bench::Args),
    /// Send requests at a constant rate, or as fast as possible, and report latencies. Flags and results are Fortio's.
    Load(Box<skysail_load::LoadArgs>),
    /// Run only a built-in workload: the echo server, or a service of the airline example.
    #[command(subcommand)]
    Workload(Workload),
    /// Print a completion script for a shell.
    #[command(after_help = "\
For bash: skysail completion bash > ~/.local/share/bash-completion/completions/skysail
For fish: skysail completion fish > ~/.config/fish/completions/skysail.fish
For zsh:  skysail completion zsh > _skysail, in a folder of $fpath")]
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
enum Workload {
    /// Run the echo server: it reports HTTP requests as JSON, and returns gRPC messages and TCP bytes.
    ///
    /// `/status/503` and `/delay/2s` in the path, or `?status=503&delay=200ms`, set the status and the delay of a
    /// response.
    Echo(echo::Args),
    /// Run a service of the airline example, or its traffic generator.
    Airline(airline::Args),
    #[command(hide = true)]
    Load(load::LoadArgs),
}

fn main() -> ExitCode {
    ExitCode::from(run(Cli::parse_from(arguments()).command).unwrap_or_else(|error| {
        let code = exit::of_error(&error);
        if code != exit::READER_LEFT {
            stdio::print_error(format!("skysail: {error:#}"));
        }
        code
    }))
}

/// Returns the arguments of the program. Flags of `skysail load` may have one dash.
fn arguments() -> Vec<OsString> {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let command = Cli::command();
    match command.find_subcommand("load").filter(|_| arguments.get(1).is_some_and(|name| name == "load")) {
        Some(load) => skysail_load::accept_single_dashes(arguments, load),
        None => arguments,
    }
}

fn run(command: Command) -> anyhow::Result<u8> {
    let done = |()| exit::OK;
    match command {
        Command::Up(args) => up::outside(args),
        Command::UpInside(args) => up::inside(args),
        Command::UpEgress => Ok(skysail_sandbox::forward_egress().map(done)?),
        Command::Exec(args) => pods::exec(&args),
        Command::Call(args) => call::run(args),
        Command::Explain(args) => explain::run(&args),
        Command::PortForward(args) => port_forward::run(&args),
        Command::Dashboard(args) => dashboard::run(&args),
        Command::Logs(args) => pods::logs(&args),
        Command::Status(args) => status::run(&args),
        Command::Analyze(args) => analyze::run(args),
        Command::Inject(args) => inject::run(&args),
        Command::Install(args) => install::run_install(&args),
        Command::Uninstall(args) => install::run_uninstall(&args),
        Command::Check(args) => check::run(&args),
        Command::Crds => install::print_definitions(),
        Command::Image(args) => image::run(&args),
        Command::Ca(args) => ca::run(args),
        Command::Control(args) => skysail_control::run(args).map(done),
        Command::Proxy(program) => program.run(),
        Command::Workload(Workload::Airline(args)) => airline::run(args).map(done),
        Command::Bench(args) => skysail_bench::run(args).map(exit::of),
        Command::Load(args) => skysail_load::run(&args).map(exit::of),
        Command::Workload(Workload::Echo(args)) => Ok(echo::run(args).map(done)?),
        Command::Workload(Workload::Load(args)) => load::run(&args),
        Command::Completion { shell } => {
            let all = Cli::command();
            let shown = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
            let mut shown =
                clap::Command::new("skysail").version(env!("CARGO_PKG_VERSION")).subcommands(shown);
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut shown, "skysail", &mut script);
            stdio::write(&script)?;
            Ok(exit::OK)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_valid() {
        Cli::command().debug_assert();
    }
}
