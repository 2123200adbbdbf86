//! The program `skysail-proxy`: the sidecar, and the commands of a pod around it.

use skysail_core::stdio;
use skysail_intercept::InterceptArgs;

use crate::app::{self, args::Args};

/// Arguments of the program. Without a command it is the sidecar, so that it can be started as an Envoy.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Program {
    #[command(flatten)]
    sidecar: Args,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Redirect the connections of this pod to its sidecar: the init container of injected pods.
    Intercept(Box<InterceptArgs>),
}

impl Program {
    /// Runs the sidecar, or the command, and returns the exit code.
    ///
    /// # Errors
    /// The sidecar cannot start.
    pub fn run(self) -> anyhow::Result<u8> {
        match self.command {
            None => app::run(self.sidecar).map(|()| 0),
            Some(Command::Intercept(args)) => Ok(skysail_intercept::run(&args).map_or_else(
                |error| {
                    stdio::print_error(format_args!("skysail-proxy intercept: {error}"));
                    error.exit_code()
                },
                |()| 0,
            )),
        }
    }
}
