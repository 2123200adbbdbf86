//! Programs of a mesh: the control plane, and each pod's sidecar and containers.

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
    containers::{self, Images, PodFolders, Role},
    error::{Context as _, Error},
    networks::BRIDGE,
    objects::{self, Container, Objects},
    plan::Pod,
    pod::ContainerProgram,
    ports::Ports,
    process::{Program, Restart},
    publish::Target,
    readiness::{Check, ProbeAction, RestartProbe, RestartProbes},
    rundir, scrape, unsupported, volumes,
};

/// Socket mark of sidecars, whose own connections are not intercepted.
pub(crate) const MARK: u32 = 0x5111;

/// Maximum length of a folder that has sockets of an Envoy's agent. The path of a socket has at most 107 bytes (unix(7)).
const MAX_SOCKET_FOLDER: usize = 64;

/// Settings of a mesh.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Name of the mesh.
    pub name: String,
    /// Folder of the mesh, from [`rundir::create`].
    pub folder: PathBuf,
    /// Configuration folders and files.
    pub config: Vec<PathBuf>,
    /// Programs by image name.
    pub images: BTreeMap<String, Vec<String>>,
    /// Program of images that are not listed there.
    pub stand_in: Vec<String>,
    /// Program of the control plane; if it is empty, there is none.
    pub control: Vec<String>,
    /// Program of the sidecar; if it is empty, there is none.
    pub proxy: Vec<String>,
    /// True if containers of other images run their own `command` on this machine.
    pub runs_commands: bool,
    /// Maximum number of pods.
    pub max_pods: usize,
    /// Number of worker threads of a sidecar whose own settings have none.
    pub concurrency: NonZeroU32,
    /// Workloads (`NAMESPACE/NAME`) with an Envoy instead of the sidecar, and its program.
    pub envoys: BTreeMap<String, PathBuf>,
    /// Further arguments of the control plane.
    pub control_arguments: Vec<String>,
    /// Targets of published ports.
    pub published: Vec<Target>,
    /// True if workloads may connect to hosts outside the mesh.
    pub egress: bool,
}

/// Returns the control plane's program; `None` if it is disabled.
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
    // The mesh's DNS server is the only one that the control plane can reach.
    command.extend(["--dns-server".to_owned(), BRIDGE.to_string()]);
    // The user's arguments follow and may override it.
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

/// Time limit of the drain of sidecars without a setting. Source: Istio's default.
const DRAIN: Duration = Duration::from_secs(5);

/// Returns the time limit of the drain of a pod's sidecar, in whole seconds.
pub(crate) fn drain(pod: &Pod) -> Duration {
    pod.settings.drain.map_or(DRAIN, |drain| Duration::from_secs(drain.0.as_secs().max(1)))
}

/// Returns a pod's sidecar, and writes the file with its node. `None` if the pod has no sidecar.
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
    let concurrency = pod.concurrency(settings.concurrency);
    rundir::replace(&node, pod.node(concurrency).to_string().as_bytes()).context("describing the sidecar")?;
    let (mut command, mut environment) = (settings.proxy.clone(), BTreeMap::new());
    for (name, value) in [
        ("--discovery", format!("{BRIDGE}:{DISCOVERY_TLS_PORT}")),
        ("--ca-root", text(&settings.folder.join("ca/root-cert.pem"))),
        ("--token", text(&folder.join("token"))),
        ("--node", text(&node)),
        ("--concurrency", concurrency.to_string()),
        ("--drain-seconds", drain(pod).as_secs().to_string()),
        ("--interception-mark", MARK.to_string()),
    ] {
        command.extend([name.to_owned(), value]);
    }
    if pod.settings.merges_metrics.unwrap_or(true)
        && let Ok(Some(page)) = scrape::page(&pod.annotations)
    {
        environment.insert(scrape::VARIABLE.to_owned(), page);
    }
    if let Some(envoy) = settings.envoys.get(&format!("{}/{}", pod.namespace, pod.workload)) {
        command.extend(["--envoy".to_owned(), text(envoy)]);
        // Envoy's agent makes its folder here, so that it is removed with the mesh.
        if settings.folder.as_os_str().len() <= MAX_SOCKET_FOLDER {
            environment.insert("TMPDIR".to_owned(), text(&settings.folder));
        }
    }
    let log = logs.join("proxy.log");
    let name = "proxy".to_owned();
    let (restart, view) = (Restart::Always, Arc::default());
    Ok(Some(Program { name, command, environment, log, restart, view }))
}

/// Programs of a pod.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    /// Programs of init containers, in their order.
    pub(crate) init: Vec<Program>,
    pub(crate) containers: Vec<ContainerProgram>,
    /// Names of the volumes that they mount.
    pub(crate) volumes: BTreeSet<String>,
    /// Notes for the user.
    pub(crate) notes: Vec<String>,
}

/// Returns the programs of a pod's containers.
pub(crate) fn containers(
    settings: &Settings,
    objects: &Objects,
    pod: &Pod,
    folders: PodFolders<'_>,
) -> Programs {
    let mut programs = Programs { notes: unsupported::of_pod(&pod.spec), ..Programs::default() };
    let Settings { images, stand_in, runs_commands, .. } = settings;
    let images = Images { known: images, stand_in, runs_commands: *runs_commands };
    let restart = restart(pod);
    // An init container with restartPolicy Always is a native sidecar: it runs beside the containers.
    let is_sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
    for container in pod.spec.init_containers.iter().filter(|container| !is_sidecar(container)) {
        let restart = if restart == Restart::Always { Restart::OnFailure(u32::MAX) } else { restart };
        let what = (Role::Ends, restart);
        let (program, notes) =
            containers::program(container, pod, &Ports::default(), objects, images, what, folders);
        programs.init.push(program);
        programs.notes.extend(notes);
    }
    let sidecars = pod.spec.init_containers.iter().filter(|container| is_sidecar(container));
    let serving: Vec<&Container> = sidecars.chain(pod.containers()).collect();
    let all = pod.spec.init_containers.iter().chain(pod.containers());
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
        let (program, notes) =
            containers::program(container, pod, &ports, objects, images, (role, restart), folders);
        programs.notes.extend(notes);
        // Without a supported probe, a container is ready when its first port accepts connections.
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
        programs.containers.push(ContainerProgram { program, check, restart_probes, ports: named.collect() });
    }
    programs
}

/// Returns the restart policy of a pod's programs.
fn restart(pod: &Pod) -> Restart {
    match (pod.kind.as_str(), pod.spec.restart_policy.as_deref()) {
        ("Job", _) => Restart::OnFailure(pod.backoff_limit),
        (_, Some("OnFailure")) => Restart::OnFailure(u32::MAX),
        (_, Some("Never")) => Restart::Never,
        _ => Restart::Always,
    }
}

/// Default grace period in seconds. Source: Kubernetes' `terminationGracePeriodSeconds`.
pub(crate) const GRACE: u64 = 30;
/// Default interval and timeout of probes. Source: Kubernetes.
const PERIOD: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(1);

/// Returns the check for a probe. Stand-ins have no pages and services of their own, and HTTPS is not supported; in
/// these cases the check connects to the port. `None` for a command in a stand-in, or an unknown port.
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
            Some(page) => ProbeAction::Get(port, page.path.clone().unwrap_or_else(|| "/".to_owned())),
            None => ProbeAction::Connect(port),
        }
    } else if let Some(target) = grpc {
        match is_stand_in {
            true => ProbeAction::Connect(target.port),
            false => ProbeAction::Grpc(target.port, target.service.clone().unwrap_or_default()),
        }
    } else {
        let command = exec.as_ref().filter(|_| !is_stand_in)?.command.clone();
        ProbeAction::Exec(command, program.environment.clone(), Arc::clone(&program.view))
    };
    Some(Check {
        probe: what,
        period: Some(seconds(probe.period_seconds, PERIOD)),
        limit: seconds(probe.timeout_seconds, LIMIT),
        failures: probe.failure_threshold.filter(|number| *number > 0).unwrap_or(3),
    })
}

/// Returns the startup and liveness probes.
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

/// Returns a probe's time; as in the API server, 0 means the default.
fn seconds(number: Option<u64>, default: Duration) -> Duration {
    number.filter(|number| *number > 0).map_or(default, Duration::from_secs)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
