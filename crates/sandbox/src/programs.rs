//! Which programs a mesh runs: the control plane, and in each pod the sidecar and one for every container.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use skysail_core::names::DISCOVERY_TLS_PORT;

use crate::{
    containers::{self, Images},
    error::{Context as _, Error},
    objects::{Objects, Probe},
    plan::{BRIDGE, Pod},
    pod::Check,
    process::Program,
    rundir, unsupported,
};

/// Marks the sockets of sidecars, whose connections are not intercepted.
pub(crate) const MARK: u32 = 0x5111;

/// What to run, and with which programs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// The mesh's name.
    pub name: String,
    /// The mesh's folder, from [`rundir::create`].
    pub folder: PathBuf,
    /// The user's YAML.
    pub config: Vec<PathBuf>,
    /// The programs that stand for images.
    pub images: BTreeMap<String, Vec<String>>,
    /// The program that stands in for images not named there.
    pub stand_in: Vec<String>,
    /// The control plane's program; none runs if it is empty.
    pub control: Vec<String>,
    /// The sidecar's program; pods have none if it is empty.
    pub proxy: Vec<String>,
    /// Worker threads of a sidecar.
    pub concurrency: u32,
    /// Workloads (`NAMESPACE/NAME`) that have an Envoy in the sidecar's place, and its program.
    pub envoys: BTreeMap<String, PathBuf>,
    /// Further arguments for the control plane.
    pub control_arguments: Vec<String>,
}

/// The control plane, if there is to be one.
pub(crate) fn control(settings: &Settings) -> Option<Program> {
    let Settings { control, folder, config, .. } = settings;
    if control.is_empty() {
        return None;
    }
    let mut command = control.clone();
    // What is generated comes last: it completes what the user wrote.
    for folder in config.iter().chain([&folder.join("generated")]) {
        command.extend(["--config".to_owned(), text(folder)]);
    }
    command.extend(["--listen".to_owned(), BRIDGE.to_string()]);
    command.extend(["--ca-dir".to_owned(), text(&folder.join("ca"))]);
    command.extend(["--state-dir".to_owned(), text(&folder.join("state"))]);
    command.extend(["--token-key".to_owned(), text(&folder.join("token-key.pem"))]);
    // Names that the mesh itself knows are all that there are here.
    command.extend(["--dns-server".to_owned(), BRIDGE.to_string()]);
    command.extend(settings.control_arguments.iter().cloned());
    let log = folder.join("logs/control.log");
    Some(Program { name: "control plane".to_owned(), command, environment: BTreeMap::new(), log })
}

/// A pod's sidecar, and the file that says to it who it is.
pub(crate) fn sidecar(
    settings: &Settings,
    pod: &Pod,
    folder: &Path,
    logs: &Path,
) -> Result<Option<Program>, Error> {
    if !pod.sidecar {
        return Ok(None);
    }
    fs::create_dir_all(folder).context(format!("making {}", folder.display()))?;
    let node = folder.join("node.json");
    let concurrency = settings.concurrency;
    rundir::replace(&node, pod.node(concurrency).to_string().as_bytes()).context("describing the sidecar")?;
    let mut command = settings.proxy.clone();
    for (name, value) in [
        ("--discovery", format!("{BRIDGE}:{DISCOVERY_TLS_PORT}")),
        ("--ca-root", text(&settings.folder.join("ca/root-cert.pem"))),
        ("--token", text(&folder.join("token"))),
        ("--node", text(&node)),
        ("--concurrency", concurrency.to_string()),
        ("--interception-mark", MARK.to_string()),
    ] {
        command.extend([name.to_owned(), value]);
    }
    if let Some(envoy) = settings.envoys.get(&format!("{}/{}", pod.namespace, pod.workload)) {
        command.extend(["--envoy".to_owned(), text(envoy)]);
    }
    let log = logs.join("proxy.log");
    Ok(Some(Program { name: "proxy".to_owned(), command, environment: BTreeMap::new(), log }))
}

/// The programs for a pod's containers, how to see that they are ready, and what users should know.
pub(crate) fn containers(
    settings: &Settings,
    objects: &Objects,
    pod: &Pod,
    logs: &Path,
) -> (Vec<Program>, Vec<Check>, Vec<String>) {
    let (mut programs, mut checks, mut notes) = (Vec::new(), Vec::new(), unsupported::of_pod(&pod.spec));
    let images = Images { known: &settings.images, stand_in: &settings.stand_in };
    for container in &pod.spec.containers {
        let ports = pod.ports(container, objects);
        let (program, said) = containers::program(container, pod, &ports, objects, images, logs);
        programs.push(program);
        notes.extend(said);
        let stand_in = !containers::is_known(images, &container.image);
        // Without a probe that can be made here, a container is ready when its first port accepts.
        let probe = container.readiness_probe.as_ref().and_then(|probe| check(probe, pod, stand_in));
        checks.extend(probe.or_else(|| ports.first().map(|port| Check { port: *port, ..Check::default() })));
    }
    (programs, checks, notes)
}

/// How to check a container by its probe. Stand-ins have no pages of their own, and HTTPS is not spoken, so there the
/// port must do.
fn check(probe: &Probe, pod: &Pod, stand_in: bool) -> Option<Check> {
    let target = probe.http_get.as_ref().or(probe.tcp_socket.as_ref())?;
    let path = probe.http_get.as_ref().filter(|target| !stand_in && !target.is_https());
    let default = Check::default();
    Some(Check {
        port: target.port.resolve(&pod.spec.containers)?,
        path: path.map(|target| target.path.clone().unwrap_or_else(|| "/".to_owned())),
        period: probe.period_seconds.map_or(default.period, Duration::from_secs),
        limit: probe.timeout_seconds.map_or(default.limit, Duration::from_secs),
        failures: probe.failure_threshold.unwrap_or(default.failures),
    })
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
