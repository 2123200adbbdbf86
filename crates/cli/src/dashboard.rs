//! `skysail dashboard`: the admin page of a sidecar or of the control plane in a browser of this machine.

use std::{
    env,
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
};

use anyhow::bail;
use skysail_core::{
    names::{ADMIN_PORT, CONTROL_ADMIN_PORT},
    stdio,
};
use skysail_sandbox::{enter::EnterTarget, rundir};

use crate::{
    pods,
    port_forward::{self, Ports},
};

/// Arguments of `skysail dashboard`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skysail dashboard                       the control plane
  skysail dashboard booking --port 15000  the sidecar of booking, at 127.0.0.1:15000

The first page lists the others. The command ends with Ctrl-C (exit code 0) or when the pod is removed (exit code 1). \
While it runs, every user of this machine can connect, and so drain the sidecar or rotate the root certificate.")]
pub(crate) struct DashboardArgs {
    /// Workload (its first ready pod is used) or pod; NAMESPACE/NAME if the name is not unique. `control` is the
    /// control plane.
    #[arg(default_value = pods::CONTROL)]
    workload: String,
    /// Port of 127.0.0.1; 0 is any free one.
    #[arg(short, long, default_value_t = 0)]
    port: u16,
    /// Open a browser with xdg-open if there is a display.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        require_equals = true, default_missing_value = "true")]
    browser: bool,
    /// Name of the mesh, if several are running.
    #[arg(long)]
    name: Option<String>,
}

pub(crate) fn run(args: &DashboardArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let target = pods::target(&mesh, &args.workload)?;
    let (remote, what) = match target {
        EnterTarget::Pod(pod) if !pod.sidecar => {
            bail!("pod {}/{} has no sidecar, and so no admin page", pod.namespace, pod.name)
        }
        EnterTarget::Pod(pod) => (ADMIN_PORT, format!("the sidecar of {}/{}", pod.namespace, pod.name)),
        EnterTarget::Control if mesh.control.is_none() => {
            bail!("mesh {} has no control plane running", mesh.name)
        }
        EnterTarget::Control => (CONTROL_ADMIN_PORT, "the control plane".to_owned()),
    };
    let listeners = port_forward::listen(&[Ports { local: args.port, remote }])?;
    for (listener, _) in &listeners {
        let url = format!("http://{}/", listener.local_addr()?);
        stdio::print(format_args!("{url} -> {what}"))?;
        // The browser starts here, because it must use this machine's network. Its first request waits in the listener.
        if args.browser && ["DISPLAY", "WAYLAND_DISPLAY"].iter().any(|name| env::var_os(name).is_some()) {
            open(&url);
        }
    }
    port_forward::serve(&mesh, target, listeners)
}

/// Opens a browser. The page is served without one as well.
fn open(url: &str) {
    let mut command = Command::new("xdg-open");
    command.arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // A Ctrl-C ends the dashboard and not the browser.
    command.process_group(0);
    if let Err(error) = command.spawn() {
        stdio::print_error(format!("skysail: no browser was opened: xdg-open: {error}"));
    }
}
