//! The program `skysail-proxy`: the sidecar, and the commands of a pod around it.

use skysail_core::stdio;
use skysail_intercept::InterceptArgs;

use crate::app::{
    self,
    args::Args,
    hooks::{self, DrainArgs, WaitArgs},
};

/// Arguments of the program. Without a command it is the sidecar, so that it can be started as an Envoy.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Program {
    #[command(flatten)]
    sidecar: Args,

    #[command(subcommand)]
    command: Option<PodCommand>,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum PodCommand {
    /// Redirect the connections of this pod to its sidecar: the init container of injected pods.
    Intercept(Box<InterceptArgs>),
    /// Wait until the sidecar of this pod is ready: the postStart hook of its container.
    Wait(WaitArgs),
    /// Begin the drain of connections to this pod: the preStop hook of its sidecar's container.
    Drain(DrainArgs),
}

impl Program {
    /// Runs the sidecar, or the command, and returns the exit code.
    ///
    /// # Errors
    /// The sidecar cannot start, or is not ready in time, or does not begin the drain.
    pub fn run(self) -> anyhow::Result<u8> {
        match self.command {
            None => app::run(self.sidecar).map(|()| 0),
            Some(PodCommand::Wait(args)) => hooks::wait(&args).map(|()| 0),
            Some(PodCommand::Drain(args)) => hooks::drain(&args).map(|()| 0),
            Some(PodCommand::Intercept(args)) => Ok(skysail_intercept::run(&args).map_or_else(
                |error| {
                    stdio::print_error(format_args!("skysail-proxy intercept: {error}"));
                    error.exit_code()
                },
                |()| 0,
            )),
        }
    }
}
