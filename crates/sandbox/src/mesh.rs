//! The running mesh: one task that owns all state, receives every event and reconciles the pods with the configuration.
//!
//! After changes of files, events of pods or of the control plane, and ticks of the clock, [`Mesh::reconcile`] starts
//! and stops pods. [`Mesh::publish`] then writes the objects for the control plane, the DNS table and the state file
//! for other commands. Failed lookups and connections are only reported.

mod outside;
mod replicas;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use nix::net::if_::if_nametoindex;
use skysail_core::names::CONTROL_ADMIN_PORT;
use skysail_identity::TokenSigner;
use skysail_intercept::{netlink::Socket, rules::Rules};
use skysail_source::{FileChange, Folders};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until},
};

use outside::Reported;
use replicas::{Removal, Replica, Stage};

use crate::{
    dns::{self, FailedLookup, Table},
    egress::{self, Egress, FailedConnection},
    error::{Context as _, Error},
    external::{self, Allocation},
    files::{FileUpdate, Files},
    http, isolate, links,
    networks::{BRIDGE, POD_NETWORK},
    objects::{Key, Objects, Workload},
    plan::{self, Pod, VirtualAddresses},
    pod::{self, PodCommand, PodEvent},
    process::{self, ProcessEvent, ProcessExit, last_line},
    programs::{self, MARK, Settings},
    progress::{PODS, SERVICES},
    publish,
    rules::{self, VirtualPort},
    rundir::{self, Phase, PodState, ProgramState, State},
};

/// Exit code for wrong usage, of clap and of `skysail`: a restart would fail again.
const USAGE: i32 = 2;
/// Interval at which removed files and starting pods are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Report of a running mesh.
#[derive(Debug)]
pub enum Report {
    /// A message for the user.
    Note(String),
    /// The mesh cannot continue.
    Failed(Error),
}

/// Handle of a running mesh.
#[derive(Debug)]
pub struct MeshHandle {
    /// The pods; updated at each change.
    pub state: watch::Receiver<State>,
    /// Reports.
    pub reports: mpsc::UnboundedReceiver<Report>,
    /// Address of the control plane's admin page.
    pub control: SocketAddr,
}

struct Mesh {
    settings: Settings,
    files: Files,
    objects: Objects,
    pods: BTreeMap<(String, String), Replica>,
    addresses: VirtualAddresses,
    allocation: Allocation,
    names: Table,
    signer: TokenSigner,
    bridge: u32,
    /// Egress, if it is enabled.
    egress: Option<Egress>,
    /// Socket for the packet rules of the bridge's namespace, and these rules.
    netfilter: Socket,
    bridge_rules: Rules,
    /// Folders of PersistentVolumeClaims, by namespace and name.
    claims: BTreeMap<Key, PathBuf>,
    /// Number of pods created so far. It numbers links and addresses.
    created: u32,
    virtual_ports: Vec<VirtualPort>,
    /// Marker of packet rules that are not in effect yet. Each command to replace rules holds a clone, which
    /// is dropped when the rules are in effect.
    rules_in_flight: Arc<()>,
    /// Sends a removal to the mesh's task when its pods may stop. At most one removal is in progress.
    removal_sender: mpsc::UnboundedSender<Removal>,
    removal_under_way: bool,
    published: BTreeMap<&'static str, String>,
    noted: BTreeSet<String>,
    /// Lookups without an answer, by workload or ServiceEntry and name.
    reported_lookups: Reported,
    /// Failed connections to addresses outside the mesh.
    reported_connections: Reported,
    /// Reasons why workloads have fewer pods than their replicas.
    refused: Vec<String>,
    control_process: Option<u32>,
    event_sender: mpsc::UnboundedSender<((String, String), PodEvent)>,
    reports: mpsc::UnboundedSender<Report>,
    state: watch::Sender<State>,
    process: u32,
}

/// Sets up the inner side of a mesh and starts it. Must be called in the process that [`isolate::run_inside`] started.
///
/// # Errors
/// The machine lacks something that the mesh needs, or the files cannot be read.
pub async fn start(settings: Settings) -> Result<MeshHandle, Error> {
    let (process, channel) = isolate::set_up(settings.egress)?;
    let mut socket = Socket::route().context("opening a netlink socket")?;
    links::bridge(&mut socket, BRIDGE, POD_NETWORK.1).map_err(|source| Error::Missing {
        what: "a bridge between pods",
        remedy: "Load the kernel's bridge module: `sudo modprobe bridge`".to_owned(),
        cause: source,
    })?;
    let (failure_sender, failed) = mpsc::channel(64);
    let egress = channel.map(|channel| egress::open(channel, failure_sender)).transpose()?;
    let lookups = egress.as_ref().map(|egress| Arc::clone(&egress.lookups));
    let signer = TokenSigner::new().context("making the key for service account tokens")?;
    let generated = settings.folder.join("generated");
    fs::create_dir_all(&generated).context(format!("making {}", generated.display()))?;
    fs::write(settings.folder.join("token-key.pem"), signer.public_key()).context("writing the token key")?;
    let shown: Vec<_> = settings.config.iter().map(|path| path.display().to_string()).collect();
    let what = format!("reading {}", shown.join(", "));
    let mut folders = Folders::new(&settings.config).context(&what)?;
    let mut files = Files::default();
    for change in folders.scan() {
        files.take(FileUpdate::of(change));
    }

    let (event_sender, events) = mpsc::unbounded_channel();
    let (removal_sender, removed) = mpsc::unbounded_channel();
    let (outside, lookup_failures) = mpsc::channel(16);
    let (reports, reported) = mpsc::unbounded_channel();
    let (state, state_receiver) = watch::channel(State::default());
    let mut mesh = Mesh {
        objects: files.objects(),
        files,
        pods: BTreeMap::new(),
        addresses: VirtualAddresses::default(),
        allocation: Allocation::default(),
        names: Table::default(),
        signer,
        bridge: if_nametoindex(links::BRIDGE).context("finding the bridge")?,
        egress,
        netfilter: pod::netfilter()?,
        bridge_rules: Rules::default(),
        claims: BTreeMap::new(),
        created: 0,
        virtual_ports: Vec::new(),
        rules_in_flight: Arc::default(),
        removal_sender,
        removal_under_way: false,
        published: BTreeMap::new(),
        noted: BTreeSet::new(),
        reported_lookups: Reported::new("names without an answer"),
        reported_connections: Reported::new("failed connections to addresses outside the mesh"),
        refused: Vec::new(),
        control_process: None,
        event_sender,
        reports,
        state,
        process,
        settings,
    };
    let server = dns::Server { table: mesh.names.clone(), lookups, outside };
    tokio::spawn(serve_dns(server, mesh.reports.clone()));
    mesh.publish();
    let control = SocketAddr::from((BRIDGE, CONTROL_ADMIN_PORT));
    let (changes, updates) = mpsc::unbounded_channel();
    tokio::spawn(watch_files(folders, changes, mesh.reports.clone()));
    tokio::spawn(mesh.run(Inputs { events, removed, lookup_failures, failed, updates }));
    Ok(MeshHandle { state: state_receiver, reports: reported, control })
}

/// Serves DNS on the bridge until an error, and reports it.
async fn serve_dns(server: dns::Server, reports: mpsc::UnboundedSender<Report>) {
    if let Err(cause) = dns::serve(SocketAddr::from((BRIDGE, 53)), server).await {
        let what = "the mesh's DNS server".to_owned();
        let _ = reports.send(Report::Failed(Error::System { what, cause }));
    }
}

/// Sends the changes of files until an error, and reports it. The changes are parsed on a separate thread, so that
/// large files do not block the mesh.
async fn watch_files(
    folders: Folders,
    changes: mpsc::UnboundedSender<FileUpdate>,
    reports: mpsc::UnboundedSender<Report>,
) {
    let parse = move |found: Vec<FileChange>| {
        for change in found {
            let _ = changes.send(FileUpdate::of(change));
        }
    };
    if let Err(error) = folders.watch(parse).await {
        let what = "watching the configuration".to_owned();
        let _ = reports.send(Report::Failed(Error::System { what, cause: io::Error::other(error) }));
    }
}

/// Events for the mesh, except those of the control plane.
struct Inputs {
    events: mpsc::UnboundedReceiver<((String, String), PodEvent)>,
    removed: mpsc::UnboundedReceiver<Removal>,
    lookup_failures: mpsc::Receiver<FailedLookup>,
    failed: mpsc::Receiver<FailedConnection>,
    updates: mpsc::UnboundedReceiver<FileUpdate>,
}

impl Mesh {
    async fn run(mut self, inputs: Inputs) {
        let Inputs { mut events, mut removed, mut lookup_failures, mut failed, mut updates } = inputs;
        let (control_sender, mut control_events) = mpsc::unbounded_channel();
        let (_running, stop) = watch::channel(None);
        if let Some(control) = programs::control(&self.settings) {
            tokio::spawn(async move {
                process::supervise(&control, stop, None, |outcome| {
                    let _ = control_sender.send(outcome);
                })
                .await;
            });
            // Sidecars need the control plane's root certificate, and their connections would fail before it
            // listens.
            self.wait_for_control(&mut control_events).await;
        }
        self.reconcile();
        loop {
            let reconciled_at = Instant::now();
            tokio::select! {
                Some((key, event)) = events.recv() => {
                    // This pause collects further events, so that the mesh writes their effects once for all
                    // pods.
                    sleep_until(reconciled_at + self.pace()).await;
                    self.handle_pod_event(&key, event);
                    // When many pods start at once, all their events are handled together.
                    while let Ok((key, event)) = events.try_recv() {
                        self.handle_pod_event(&key, event);
                    }
                }
                Some(outcome) = control_events.recv() => self.handle_control_event(outcome),
                Some(removal) = removed.recv() => self.stop_removed_pods(&removal),
                Some(lookup) = lookup_failures.recv() => {
                    self.report_failed_lookup(&lookup);
                    // A failed lookup only causes a message; it changes no pod.
                    continue;
                }
                Some(connection) = failed.recv() => {
                    self.report_failed_connection(connection);
                    continue;
                }
                Some(update) = updates.recv() => {
                    let mut is_other = self.files.take(update);
                    while let Ok(update) = updates.try_recv() {
                        is_other |= self.files.take(update);
                    }
                    if is_other {
                        self.take_objects();
                    }
                }
                // The check lets other pods start when a pod has been starting for too long.
                () = sleep(POLL_INTERVAL), if self.starting() > 0 => {}
                () = sleep(POLL_INTERVAL), if self.files.has_missing() => {
                    if self.files.remove_missing() {
                        self.take_objects();
                    }
                }
            }
            self.reconcile();
        }
    }

    /// Returns the time for which events of pods are collected before the mesh acts on them. Each action costs time for
    /// every pod.
    fn pace(&self) -> Duration {
        Duration::from_micros(250) * u32::try_from(self.pods.len()).unwrap_or(u32::MAX)
    }

    async fn wait_for_control(&mut self, events: &mut mpsc::UnboundedReceiver<ProcessEvent>) {
        let admin = SocketAddr::from((BRIDGE, CONTROL_ADMIN_PORT));
        let root = self.settings.folder.join("ca/root-cert.pem");
        loop {
            while let Ok(outcome) = events.try_recv() {
                self.handle_control_event(outcome);
            }
            let answer = http::get(admin, "/ready", Duration::from_secs(1)).await;
            if matches!(answer, Ok((200, _))) && root.exists() {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn handle_control_event(&mut self, outcome: ProcessEvent) {
        match outcome {
            ProcessEvent::Started(id, _) => self.control_process = Some(id),
            ProcessEvent::Ended(ProcessExit { how, code, .. }) => {
                self.control_process = None;
                let log = self.settings.folder.join("logs/control.log");
                if code == Some(USAGE) {
                    return self.fail("the control plane cannot start".to_owned(), &log);
                }
                let line = last_line(&log).unwrap_or_else(|| format!("none in {}", log.display()));
                self.say(format!("control plane: exited ({how}); restarting. Last log line: {line}"));
            }
        }
    }

    fn handle_pod_event(&mut self, key: &(String, String), event: PodEvent) {
        let Some(replica) = self.pods.get_mut(key) else { return };
        let state = &mut replica.state;
        match event {
            PodEvent::Created(handles) => state.handles = Some(handles),
            PodEvent::Ready(_) if state.phase != Phase::Running => {}
            PodEvent::Ready(ready) => {
                replica.has_started |= ready.is_ok();
                state.ready = ready;
            }
            PodEvent::Started(program, id, mounts) => {
                state.mounts.extend(mounts.map(|mounts| (program.clone(), mounts)));
                match state.programs.iter_mut().find(|known| known.name == program) {
                    Some(known) => {
                        known.process = Some(id);
                        state.restarts += 1;
                    }
                    None => state.programs.push(ProgramState { name: program, process: Some(id) }),
                }
            }
            PodEvent::Ended(program, ended) => {
                if let Some(known) = state.programs.iter_mut().find(|known| known.name == program) {
                    known.process = None;
                }
                let ProcessExit { how, code, again, .. } = ended;
                let log = state.logs.join(format!("{program}.log"));
                if program == "proxy" && code == Some(USAGE) {
                    // A restart would fail again, and all other sidecars would fail too.
                    let what = format!("the sidecar of {}/{} cannot start", key.0, key.1);
                    self.fail(what, &log);
                } else if let Some(pause) = again {
                    replica.failures += 1;
                    replica.has_started = true;
                    let line = last_line(&log).unwrap_or_else(|| format!("none in {}", log.display()));
                    // Later failures have the same cause. A program that never runs must not fill the screen.
                    if replica.failures <= 3 {
                        let pause = pause.as_secs_f64();
                        self.say(format!(
                            "{}/{}: {program} exited ({how}); restarting in {pause:.1} s. Last log line: {line}",
                            key.0, key.1
                        ));
                    }
                }
            }
            PodEvent::Completed(result) => {
                replica.has_started = true;
                state.phase = if result.is_ok() { Phase::Succeeded } else { Phase::Failed };
                state.ready = Err(result.clone().err().unwrap_or_else(|| "completed".to_owned()));
                let text = result.map_or_else(|reason| reason, |()| "completed".to_owned());
                self.say(format!("{}/{}: {text}", key.0, key.1));
            }
            PodEvent::Failed(error) => {
                let _ = self.reports.send(Report::Failed(error));
            }
            PodEvent::Terminated => {
                self.pods.remove(key);
            }
        }
    }

    /// Starts missing pods, stops those that are not wanted, and publishes the result.
    fn reconcile(&mut self) {
        let mut notes: Vec<String> = self.files.notes().map(ToString::to_string).collect();
        if self.settings.control.is_empty() {
            // Without a control plane, no other program reports these errors.
            notes.extend(self.files.diagnostics().map(|found| found.to_string()));
        }
        notes.extend(publish::notes(&self.settings.published, &self.objects));
        notes.into_iter().for_each(|note| self.note(note));
        self.end_removed();
        self.refused.clear();
        let workloads: Vec<Workload> = self.objects.workloads.values().cloned().collect();
        for workload in workloads {
            self.reconcile_workload(&workload);
        }
        self.refused.clone().into_iter().for_each(|note| self.note(note));
        self.publish();
        self.begin_removal();
    }

    /// Writes the changed files among those that depend on the pods' state.
    fn publish(&mut self) {
        let in_cluster = || self.pods.values().filter(|replica| !replica.pod.is_machine());
        let pods: Vec<(&Pod, bool)> = in_cluster().map(|replica| (&replica.pod, replica.serves())).collect();
        let objects = in_cluster().map(|replica| replica.pod.object(replica.state.phase, replica.serves()));
        let pod_objects = documents(objects);
        let services = &self.objects.services;
        let addresses = self.addresses.assign(services);
        let names = plan::names(services, addresses, &pods);
        let virtual_ports = plan::virtual_ports(services, addresses, &pods);
        let mut unforwarded = None;
        let egress = self.egress.as_ref().map(|egress| egress.rules(addresses.values())).unwrap_or_default();
        let rules = rules::bridge(&virtual_ports, BRIDGE, egress);
        if rules != self.bridge_rules {
            match pod::set_rules(&mut self.netfilter, &rules) {
                Ok(()) => self.bridge_rules = rules,
                // Addresses that must stay closed would be open.
                Err(error) if self.egress.is_some() => _ = self.reports.send(Report::Failed(error)),
                Err(error) => unforwarded = Some(error),
            }
        }
        let allocated = self.allocation.assign(&self.objects.entries);
        let hosts = external::hosts(&self.objects.entries, allocated, &pods);
        // If the user set the address, the user's own object is used, and diagnostics name the user's file.
        let completed = addresses.iter().filter_map(|(key, address)| {
            let service = services.get(key).filter(|service| service.own_address().is_none())?;
            Some(service.completed(*address))
        });
        let service_objects = documents(completed.chain([external::document(allocated)]));
        let published = publish::backends(&self.settings.published, services, &pods);
        let example_call = plan::example_call(services, &pods);
        self.names.replace(names, hosts);
        if let Some(error) = unforwarded {
            self.note(format!("connections that sidecars pass through do not reach Services: {error}"));
        }
        self.write(publish::FILE, serde_json::to_string(&published).unwrap_or_default());
        self.write(SERVICES, service_objects);
        self.write(PODS, pod_objects);
        if self.virtual_ports != virtual_ports {
            let before = std::mem::replace(&mut self.virtual_ports, virtual_ports);
            for replica in self.pods.values() {
                let rules = rules_of(&replica.pod, &self.virtual_ports);
                if rules != rules_of(&replica.pod, &before) {
                    replica.running.command(PodCommand::Rules(rules, Arc::clone(&self.rules_in_flight)));
                }
            }
        }
        let pods = self.pods.values().filter(|replica| replica.stage == Stage::Wanted);
        let state = State {
            name: self.settings.name.clone(),
            process: self.process,
            control: self.control_process,
            config: self.settings.config.clone(),
            pods: pods.map(|replica| replica.state.clone()).collect(),
            refused: self.refused.clone(),
            example_call,
        };
        let text = serde_json::to_string_pretty(&state).unwrap_or_default();
        self.write("state.json", text);
        self.state.send_if_modified(|old| {
            let updates = *old != state;
            *old = state;
            updates
        });
    }

    fn write(&mut self, file: &'static str, content: String) {
        if self.published.get(file) == Some(&content) {
            return;
        }
        match rundir::replace(&self.settings.folder.join(file), content.as_bytes()) {
            Ok(()) => {
                self.published.insert(file, content);
            }
            Err(error) => self.note(format!("cannot write {file}: {error}")),
        }
    }

    /// Ends the mesh with the content of a program's log as the error.
    fn fail(&self, what: String, log: &Path) {
        let written = fs::read_to_string(log).unwrap_or_default();
        let text = format!("{what}:\n{}", written.trim());
        let _ = self.reports.send(Report::Failed(Error::Refused(text)));
    }

    /// Reports a text once.
    fn note(&mut self, text: String) {
        if self.noted.insert(text.clone()) {
            self.say(text);
        }
    }

    fn say(&self, text: String) {
        let _ = self.reports.send(Report::Note(text));
    }
}

/// Returns objects as a stream of YAML documents, each of them JSON.
fn documents(objects: impl Iterator<Item = serde_json::Value>) -> String {
    objects.map(|object| format!("---\n{object}\n")).collect()
}

/// Returns the metrics of a pod's sidecar.
///
/// # Errors
/// The sidecar does not respond.
pub async fn metrics(pod: &PodState) -> io::Result<String> {
    let address: Ipv4Addr = pod.address.parse().map_err(io::Error::other)?;
    let to = SocketAddr::from((address, skysail_core::names::METRICS_PORT));
    http::get(to, "/stats/prometheus", Duration::from_secs(2)).await.map(|(_, body)| body)
}

/// Returns the packet rules of a pod, given these ports of Services.
fn rules_of(pod: &Pod, ports: &[VirtualPort]) -> Rules {
    if !pod.intercepts() {
        return Rules { output: rules::services(ports.iter()), ..Rules::default() };
    }
    let (exceptions, _) = rules::exceptions(&pod.annotations);
    rules::interception(&exceptions, MARK, BRIDGE, ports)
}
