//! Which programs a mesh runs: the control plane, and in each pod the sidecar and one for every container.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use skysail_core::names::DISCOVERY_TLS_PORT;

use crate::{
    containers::{self, Images, Place, Role},
    error::{Context as _, Error},
    networks::BRIDGE,
    objects::{self, Container, Objects},
    plan::Pod,
    pod::Containerized,
    ports::Ports,
    process::{Program, Restart},
    publish::Target,
    readiness::{Check, Probe, RestartProbe, RestartProbes},
    rundir, unsupported, volumes,
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
    /// Whether containers of other images run their own `command` with this machine's programs.
    pub runs_commands: bool,
    /// Maximum number of pods.
    pub max_pods: usize,
    /// Worker threads of a sidecar.
    pub concurrency: NonZeroU32,
    /// Workloads (`NAMESPACE/NAME`) that have an Envoy in the sidecar's place, and its program.
    pub envoys: BTreeMap<String, PathBuf>,
    /// Further arguments for the control plane.
    pub control_arguments: Vec<String>,
    /// What ports of the host lead to.
    pub published: Vec<Target>,
    /// Whether workloads may connect to hosts outside of the mesh.
    pub egress: bool,
}

/// The control plane, if there is to be one.
pub(crate) fn control(settings: &Settings) -> Option<Program> {
    let Settings { control, folder, config, .. } = settings;
    if control.is_empty() {
        return None;
    }
    let mut command = control.clone();
    for path in config {
        command.extend(["--config".to_owned(), text(path)]);
    }
    command.extend(["--generated".to_owned(), text(&folder.join("generated"))]);
    command.extend(["--listen".to_owned(), BRIDGE.to_string()]);
    command.extend(["--ca-dir".to_owned(), text(&folder.join("ca"))]);
    command.extend(["--state-dir".to_owned(), text(&folder.join("state"))]);
    command.extend(["--token-key".to_owned(), text(&folder.join("token-key.pem"))]);
    // Names that the mesh itself knows are all that there are here.
    command.extend(["--dns-server".to_owned(), BRIDGE.to_string()]);
    // The user's own arguments come after it and override it.
    command.push("--default-access-log=/dev/stdout".to_owned());
    command.extend(settings.control_arguments.iter().cloned());
    let log = folder.join("logs/control.log");
    Some(Program {
        name: "control plane".to_owned(),
        command,
        environment: BTreeMap::new(),
        log,
        restart: Restart::Always,
        view: Arc::default(),
    })
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
    let name = "proxy".to_owned();
    let (environment, restart, view) = (BTreeMap::new(), Restart::Always, Arc::default());
    Ok(Some(Program { name, command, environment, log, restart, view }))
}

/// The programs of a pod.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    /// Those that run to their end first, one after the other.
    pub(crate) init: Vec<Program>,
    pub(crate) containers: Vec<Containerized>,
    /// The names of the volumes that they mount.
    pub(crate) volumes: BTreeSet<String>,
    /// What users should know.
    pub(crate) notes: Vec<String>,
}

/// The programs for a pod's containers.
pub(crate) fn containers(settings: &Settings, objects: &Objects, pod: &Pod, place: Place<'_>) -> Programs {
    let mut programs = Programs { notes: unsupported::of_pod(&pod.spec), ..Programs::default() };
    let Settings { images, stand_in, runs_commands, .. } = settings;
    let images = Images { known: images, stand_in, runs_commands: *runs_commands };
    let restart = restart(pod);
    // An init container that is always started again is a sidecar: it goes on beside the others.
    let is_sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
    for container in pod.spec.init_containers.iter().filter(|container| !is_sidecar(container)) {
        let restart = if restart == Restart::Always { Restart::OnFailure(u32::MAX) } else { restart };
        let what = (Role::Ends, restart);
        let (program, said) =
            containers::program(container, pod, &Ports::default(), objects, images, what, place);
        programs.init.push(program);
        programs.notes.extend(said);
    }
    let sidecars = pod.spec.init_containers.iter().filter(|container| is_sidecar(container));
    let serving: Vec<&Container> = sidecars.chain(&pod.spec.containers).collect();
    let all = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let real = all.filter(|container| !containers::is_stand_in(images, container));
    let mounted = real.flat_map(|container| volumes::mounted(container, pod));
    programs.volumes = mounted.map(|(_, volume, _)| volume.name.clone()).collect();
    let only_stand_ins = serving.iter().all(|container| containers::is_stand_in(images, container));
    for container in serving {
        let is_stand_in = containers::is_stand_in(images, container);
        let ports = match is_stand_in {
            true => Ports::of_stand_in(container, pod, objects, only_stand_ins),
            false => Ports::of_program(container, pod, objects),
        };
        let role = if pod.kind == "Job" { Role::Ends } else { Role::Serves };
        let restart = if is_sidecar(container) { Restart::Always } else { restart };
        let (program, said) =
            containers::program(container, pod, &ports, objects, images, (role, restart), place);
        programs.notes.extend(said);
        // Without a probe that can be made here, a container is ready when its first port accepts.
        let probe = container.readiness_probe.as_ref();
        let check = probe.and_then(|probe| check(probe, container, is_stand_in, &program));
        let check = match role {
            Role::Serves => check.or_else(|| ports.first().map(Check::accepts)),
            Role::Ends => None,
        };
        let named = container.ports.iter().map(|port| match &port.name {
            Some(name) => format!("{} ({name})", port.container_port),
            None => port.container_port.to_string(),
        });
        let restart_probes =
            if is_stand_in { RestartProbes::default() } else { restart_probes(container, pod, &program) };
        programs.containers.push(Containerized { program, check, restart_probes, ports: named.collect() });
    }
    programs
}

/// When the programs of a pod are started again.
fn restart(pod: &Pod) -> Restart {
    match (pod.kind.as_str(), pod.spec.restart_policy.as_deref()) {
        ("Job", _) => Restart::OnFailure(pod.backoff_limit),
        (_, Some("OnFailure")) => Restart::OnFailure(u32::MAX),
        (_, Some("Never")) => Restart::Never,
        _ => Restart::Always,
    }
}

/// Seconds that a program gets for ending. Source: Kubernetes' `terminationGracePeriodSeconds`.
pub(crate) const GRACE: u64 = 30;
/// How often a container is probed that says nothing of it, and how long an answer may take. Source: Kubernetes' defaults.
const PERIOD: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(1);

/// How to check a container by its probe. Stand-ins have no pages and commands of their own, and HTTPS is not spoken, so there the
/// port must do.
fn check(
    probe: &objects::Probe,
    container: &Container,
    is_stand_in: bool,
    program: &Program,
) -> Option<Check> {
    let objects::Probe { http_get, tcp_socket, grpc, exec, .. } = probe;
    let what = if let Some(target) = http_get.as_ref().or(tcp_socket.as_ref()) {
        let port = target.port.resolve(std::slice::from_ref(container))?;
        match http_get.as_ref().filter(|target| !is_stand_in && !target.is_https()) {
            Some(page) => Probe::Get(port, page.path.clone().unwrap_or_else(|| "/".to_owned())),
            None => Probe::Connect(port),
        }
    } else if let Some(target) = grpc {
        match is_stand_in {
            true => Probe::Connect(target.port),
            false => Probe::Grpc(target.port, target.service.clone().unwrap_or_default()),
        }
    } else {
        let command = exec.as_ref().filter(|_| !is_stand_in)?.command.clone();
        Probe::Exec(command, program.environment.clone(), Arc::clone(&program.view))
    };
    Some(Check {
        probe: what,
        period: Some(seconds(probe.period_seconds, PERIOD)),
        limit: seconds(probe.timeout_seconds, LIMIT),
        failures: probe.failure_threshold.filter(|number| *number > 0).unwrap_or(3),
    })
}

/// The probes that decide whether a container is started again.
fn restart_probes(container: &Container, pod: &Pod, program: &Program) -> RestartProbes {
    let read = |probe: Option<&objects::Probe>| {
        let probe = probe?;
        let grace = probe.termination_grace_period_seconds.or(pod.spec.termination_grace_period_seconds);
        Some(RestartProbe {
            check: check(probe, container, false, program)?,
            delay: Duration::from_secs(probe.initial_delay_seconds.unwrap_or_default()),
            grace: Duration::from_secs(grace.unwrap_or(GRACE)),
        })
    };
    let liveness = read(container.liveness_probe.as_ref());
    RestartProbes { startup: read(container.startup_probe.as_ref()), liveness }
}

/// A time of a probe; the API server takes 0 for the default.
fn seconds(number: Option<u64>, default: Duration) -> Duration {
    number.filter(|number| *number > 0).map_or(default, Duration::from_secs)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
