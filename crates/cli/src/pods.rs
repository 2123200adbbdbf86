//! `skysail exec` and `logs`: inspection of a running mesh.

use std::{ffi::OsString, io, path::PathBuf, time::Duration};

use anyhow::{Context as _, bail};
use skysail_core::stdio;
use skysail_sandbox::{
    Error,
    enter::{self, EnterTarget},
    log,
    rundir::{self, PodState, State},
};

use crate::exit;

/// Arguments of `skysail exec`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  skysail exec booking -- curl -s http://flight:9080/healthz\n  \
    skysail exec control -- curl -s http://10.244.0.1:15014/debug/syncz\n\n\
    The command runs in the pod's network, with its host name and DNS, and its connections go through the sidecar. Files \
    are those that the container sees: this machine's, and its volumes. The exit code is the command's, 127 if there is no \
    such command, and 126 if it cannot be run.")]
pub(crate) struct ExecArgs {
    /// Workload (its first ready pod is used) or pod; NAMESPACE/NAME if the name is not unique. `control` is the
    /// network of the control plane.
    workload: String,
    /// Container whose volumes the command sees [default: the pod's first].
    #[arg(short, long)]
    container: Option<String>,
    /// Name of the mesh, if several are running.
    #[arg(long)]
    name: Option<String>,
    /// Command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Arguments of `skysail logs`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples: skysail logs booking, skysail logs booking -c proxy -f, skysail logs control"
)]
pub(crate) struct LogsArgs {
    /// Workload or pod; `control` is the control plane.
    workload: String,
    /// Container whose log is printed; `proxy` is the sidecar [default: all containers but the sidecar].
    #[arg(short, long)]
    container: Option<String>,
    /// Keep printing new lines.
    #[arg(short, long)]
    follow: bool,
    /// Name of the mesh, if several are running.
    #[arg(long)]
    name: Option<String>,
}

/// Name of the control plane in place of a workload; a workload of this name needs its namespace.
pub(crate) const CONTROL: &str = "control";
/// Interval at which a followed log is read.
const POLL: Duration = Duration::from_millis(200);

pub(crate) fn exec(args: &ExecArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let target = target(&mesh, &args.workload)?;
    let container = container(target, args.container.as_deref())?;
    match enter::run(&mesh, target, container, &args.command) {
        Err(error @ Error::Command { .. }) => {
            stdio::print_error(format!("skysail: {error}"));
            let missing =
                matches!(&error, Error::Command { cause, .. } if cause.kind() == io::ErrorKind::NotFound);
            Ok(if missing { exit::NOT_FOUND } else { exit::CANNOT_RUN })
        }
        ended => Ok(ended?),
    }
}

pub(crate) fn logs(args: &LogsArgs) -> anyhow::Result<u8> {
    let mesh = rundir::find(args.name.as_deref())?;
    let files = if args.workload == CONTROL {
        vec![mesh.logs().join("control.log")]
    } else {
        let pods = find(&mesh, &args.workload)?;
        let files: Vec<_> = pods.iter().flat_map(|pod| log_files(pod, args.container.as_deref())).collect();
        if files.is_empty() {
            let known: Vec<_> = pods[0].programs.iter().map(|program| program.name.as_str()).collect();
            let wanted = args.container.as_deref().unwrap_or("but the sidecar");
            bail!("{} has no container {wanted}; it has {}", args.workload, known.join(", "));
        }
        files
    };
    let mut logs: Vec<_> = files.into_iter().map(log::Reader::new).collect();
    let several = logs.len() > 1;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    loop {
        for log in &mut logs {
            let new = log.read_new().with_context(|| format!("reading {}", log.path().display()))?;
            if !new.is_empty() && several {
                stdio::print(format_args!("==> {}", log.path().display()))?;
            }
            stdio::write(&new)?;
        }
        if !args.follow {
            return Ok(exit::OK);
        }
        runtime.block_on(async { tokio::time::sleep(POLL).await });
    }
}

/// Returns the first ready pod of WORKLOAD, its first pod if none is ready, or the control plane.
pub(crate) fn target<'a>(mesh: &'a State, workload: &str) -> anyhow::Result<EnterTarget<'a>> {
    if workload == CONTROL {
        return Ok(EnterTarget::Control);
    }
    let pods = find(mesh, workload)?;
    Ok(EnterTarget::Pod(pods.iter().find(|pod| pod.ready.is_ok()).unwrap_or(&pods[0])))
}

/// Returns the container of this name, or the pod's first.
fn container<'a>(target: EnterTarget<'a>, name: Option<&'a str>) -> anyhow::Result<Option<&'a str>> {
    match (target, name) {
        (EnterTarget::Pod(pod), Some(name)) if pod.programs.iter().all(|program| program.name != name) => {
            let known: Vec<_> = pod.programs.iter().map(|program| program.name.as_str()).collect();
            bail!("pod {} has no container {name} that has started; it has {}", pod.name, known.join(", "));
        }
        (EnterTarget::Pod(pod), None) => Ok(pod.containers.first().map(String::as_str)),
        (EnterTarget::Control, Some(_)) => bail!("the control plane has no containers"),
        (_, name) => Ok(name),
    }
}

fn find<'a>(mesh: &'a State, name: &str) -> anyhow::Result<Vec<&'a PodState>> {
    let pods = mesh.matching(name);
    let Some(first) = pods.first() else {
        let mut known: Vec<_> =
            mesh.pods.iter().map(|pod| format!("{}/{}", pod.namespace, pod.workload)).collect();
        known.dedup();
        bail!("mesh {} has no workload or pod {name}; it has {}", mesh.name, known.join(", "));
    };
    if pods.iter().any(|pod| pod.namespace != first.namespace) {
        bail!("{name} is in several namespaces: write NAMESPACE/{name}");
    }
    Ok(pods)
}

fn log_files(pod: &PodState, container: Option<&str>) -> Vec<PathBuf> {
    let programs = pod.programs.iter().filter(|program| match container {
        Some(container) => program.name == container,
        None => program.name != "proxy",
    });
    programs.map(|program| pod.logs.join(format!("{}.log", program.name))).collect()
}
