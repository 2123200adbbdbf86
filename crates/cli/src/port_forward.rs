//! `skysail port-forward`: ports of one pod on this machine's loopback.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context as _, bail};
use skysail_core::{shutdown, stdio};
use skysail_sandbox::{
    enter::{self, EnterTarget},
    forward, rundir,
    rundir::{PodState, State},
};
use tokio::task::JoinSet;

use crate::{exit, pods};

/// Arguments of `skysail port-forward`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skysail port-forward booking 9080             127.0.0.1:9080 -> port 9080 of the pod
  skysail port-forward booking 8080:9080        127.0.0.1:8080 -> port 9080 of the pod
  skysail port-forward booking :15000 :15090    its sidecar's admin page and metrics, on free ports
  skysail port-forward control 15014            the control plane's admin page

Connections are opened in the pod, to 127.0.0.1 or, if that refuses, to the pod's address. So they bypass the sidecar \
and reach pages for the pod itself. The pod is chosen at the start, as with kubectl. The command ends with Ctrl-C (exit \
code 0) or when the pod is removed (exit code 1). While it runs, every user of this machine can connect.")]
pub(crate) struct PortForwardArgs {
    /// Workload (its first ready pod is used) or pod; NAMESPACE/NAME if the name is not unique. `control` is the
    /// network of the control plane.
    workload: String,
    /// Port of the pod, and the port of 127.0.0.1 if it differs. A local port that is empty or 0 is any free one.
    #[arg(required = true, value_name = "[LOCAL:]PORT")]
    ports: Vec<Ports>,
    /// Name of the mesh, if several are running.
    #[arg(long)]
    name: Option<String>,
}

/// A port of this machine (0 for any free one) and one of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) local: u16,
    pub(crate) remote: u16,
}

/// Interval at which the pod's existence is checked.
const POLL: Duration = Duration::from_millis(500);

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (local, remote) = match text.split_once(':') {
            Some(("", remote)) => ("0", remote),
            Some(parts) => parts,
            None => (text, text),
        };
        let port = |text: &str| text.parse::<u16>().ok();
        let ports = port(local).zip(port(remote).filter(|port| *port > 0));
        let (local, remote) = ports.ok_or("write PORT, LOCAL:PORT or :PORT, such as 8080:9080")?;
        Ok(Self { local, remote })
    }
}

pub(crate) fn run(args: &PortForwardArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let target = pods::target(&mesh, &args.workload)?;
    let listeners = listen(&args.ports)?;
    for (listener, remote) in &listeners {
        stdio::print(format_args!("Forwarding from {} -> {remote}", listener.local_addr()?))?;
    }
    serve(&mesh, target, listeners)
}

/// Listens on the local ports. Returns each listener with the port of the pod.
pub(crate) fn listen(ports: &[Ports]) -> anyhow::Result<Vec<(TcpListener, u16)>> {
    let bind = |ports: &Ports| {
        let listener = forward::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, ports.local)))
            .with_context(|| format!("forwarding to port {}", ports.remote))?;
        Ok((listener, ports.remote))
    };
    ports.iter().map(bind).collect()
}

/// Forwards the connections of these listeners to the target's ports until a signal or the end of the target.
pub(crate) fn serve(
    mesh: &State,
    target: EnterTarget<'_>,
    listeners: Vec<(TcpListener, u16)>,
) -> anyhow::Result<u8> {
    // The listeners stay in the host's network namespace.
    enter::enter_network(mesh, target)?;
    let own = match target {
        EnterTarget::Pod(pod) => {
            pod.address.parse().with_context(|| format!("the address of pod {}", pod.name))?
        }
        EnterTarget::Control => enter::control_address().ip(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut forwards = JoinSet::new();
        for (listener, remote) in listeners {
            let local = listener.local_addr()?;
            let targets = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, remote)), SocketAddr::new(own, remote)];
            let failed = move |failure| stdio::print_error(format!("skysail: {local} -> {remote}: {failure}"));
            forwards.spawn(forward::serve(listener, move || targets.clone(), failed));
        }
        tokio::select! {
            signal = shutdown::terminate() => { signal?; Ok(exit::OK) }
            Some(ended) = forwards.join_next() => { ended??; bail!("a listener has ended") }
            reason = target_end(mesh, target) => { stdio::print_error(format!("skysail: {reason}")); Ok(exit::BAD) }
        }
    })
}

/// Waits until the target has ended. Returns the reason.
async fn target_end(mesh: &State, target: EnterTarget<'_>) -> String {
    loop {
        tokio::time::sleep(POLL).await;
        let Ok(now) = rundir::find(Some(&mesh.name)) else { return format!("mesh {} has ended", mesh.name) };
        if !mesh.is_same_run(&now) {
            return format!("mesh {} has ended; another mesh with this name is running", mesh.name);
        }
        let EnterTarget::Pod(pod) = target else { continue };
        let is_it = |other: &PodState| (&other.namespace, &other.name) == (&pod.namespace, &pod.name);
        if !now.pods.iter().any(is_it) {
            return format!(
                "pod {}/{} was removed; run the command again to forward to another pod",
                pod.namespace, pod.name
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_parsed_as_by_kubectl() {
        let ports = |local, remote| Ok(Ports { local, remote });
        assert_eq!("9080".parse(), ports(9080, 9080));
        assert_eq!("8080:9080".parse(), ports(8080, 9080));
        assert_eq!(":15090".parse(), ports(0, 15090));
        assert_eq!("0:15090".parse(), ports(0, 15090));
        for text in ["", ":", "80:", "a", "80:80:80", "70000", "0", "80:0", "-1"] {
            assert!(text.parse::<Ports>().is_err(), "{text}");
        }
    }
}
