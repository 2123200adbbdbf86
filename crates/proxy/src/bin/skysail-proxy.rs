//! `skysail-proxy` as a standalone program.

use std::process::ExitCode;

use clap::Parser as _;

/// Sidecar proxy: carries a workload's inbound and outbound traffic.
#[derive(clap::Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    program: skysail_proxy::Program,
}

fn main() -> anyhow::Result<ExitCode> {
    Cli::parse().program.run().map(ExitCode::from)
}
