//! The running mesh: one task that owns all state, hears of every event and makes what is there like what is wanted.
//!
//! Events are changes of the files, messages of pods, and the clock. After each, [`Mesh::settle`] starts and ends
//! pods, and [`Mesh::publish`] writes what the control plane reads, what DNS answers and what other commands see.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use nix::net::if_::if_nametoindex;
use skysail_core::names::CONTROL_ADMIN_PORT;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};

use crate::{
    dns::{self, DOMAIN, Table},
    error::{Context as _, Error},
    http, isolate, links,
    netlink::Socket,
    objects::{Objects, Reader, Workload, fnv, letters},
    plan::{self, BRIDGE, POD_NETWORK, Pod, VirtualAddresses},
    pod::{Blueprint, Event, Order, Running},
    process::{self, Outcome},
    programs::{self, MARK, Settings},
    rules::{self, Exceptions, Rules, VirtualPort},
    rundir::{self, PodState, ProgramState, State},
    token::Issuer,
};

/// Files are looked at this often.
const LOOK: Duration = Duration::from_millis(100);
/// What a pod that is to go waits until nobody sends to it any more.
const UNPUBLISHED: Duration = Duration::from_secs(2);
/// Kubernetes' terminationGracePeriodSeconds.
const GRACE: u64 = 30;
/// A bridge takes 1,023 links (linux/br_private.h).
const MOST_PODS: usize = 1000;

/// What a mesh tells while it runs.
#[derive(Debug)]
pub enum Report {
    /// Something worth a line.
    Note(String),
    /// The mesh cannot go on.
    Failed(Error),
}

/// A mesh as seen by the one who started it.
#[derive(Debug)]
pub struct Started {
    /// The pods, whenever they change.
    pub state: watch::Receiver<State>,
    /// What happens.
    pub reports: mpsc::UnboundedReceiver<Report>,
    /// The control plane's admin page.
    pub control: SocketAddr,
}

struct Mesh {
    settings: Settings,
    objects: Objects,
    pods: BTreeMap<(String, String), Member>,
    addresses: VirtualAddresses,
    names: Table,
    issuer: Issuer,
    bridge: u32,
    /// Pods made so far: numbers links and addresses.
    made: u32,
    virtual_ports: Vec<VirtualPort>,
    published: BTreeMap<&'static str, String>,
    noted: BTreeSet<String>,
    control_process: Option<u32>,
    tell: mpsc::UnboundedSender<((String, String), Event)>,
    reports: mpsc::UnboundedSender<Report>,
    state: watch::Sender<State>,
    process: u32,
}

/// A pod and how it does.
struct Member {
    pod: Pod,
    /// Later ones have higher numbers.
    number: u32,
    running: Running,
    state: PodState,
    /// When it is told to end, once it is to go.
    leaving: Option<Instant>,
    told: bool,
    failures: VecDeque<String>,
}

/// Sets up the inner side of a mesh and starts it. Call it in the process that [`isolate::run_inside`] started.
///
/// # Errors
/// When the machine lacks something the mesh needs, or the files cannot be read.
pub async fn start(settings: Settings) -> Result<Started, Error> {
    let process = isolate::settle()?;
    let mut socket = Socket::route().context("opening a netlink socket")?;
    links::bridge(&mut socket, BRIDGE, POD_NETWORK.1).map_err(|source| Error::Missing {
        what: "a bridge between pods",
        remedy: "The kernel needs bridges built in or as a module: try `sudo modprobe bridge`".to_owned(),
        cause: source,
    })?;
    let issuer = Issuer::new().context("making the key for service account tokens")?;
    let generated = settings.folder.join("generated");
    fs::create_dir_all(&generated).context(format!("making {}", generated.display()))?;
    fs::write(settings.folder.join("token-key.pem"), issuer.public_key()).context("writing the token key")?;
    let mut reader = Reader::new(settings.config.clone());
    let shown: Vec<_> = settings.config.iter().map(|path| path.display().to_string()).collect();
    reader.read().context(format!("reading {}", shown.join(", ")))?;

    let (tell, told) = mpsc::unbounded_channel();
    let (reports, reported) = mpsc::unbounded_channel();
    let (state, watched) = watch::channel(State::default());
    let mut mesh = Mesh {
        objects: reader.objects(),
        pods: BTreeMap::new(),
        addresses: VirtualAddresses::default(),
        names: Table::default(),
        issuer,
        bridge: if_nametoindex(links::BRIDGE).context("finding the bridge")?,
        made: 0,
        virtual_ports: Vec::new(),
        published: BTreeMap::new(),
        noted: BTreeSet::new(),
        control_process: None,
        tell,
        reports,
        state,
        process,
        settings,
    };
    let names = mesh.names.clone();
    let failing = mesh.reports.clone();
    tokio::spawn(async move {
        if let Err(source) = dns::serve(SocketAddr::from((BRIDGE, 53)), names).await {
            let what = "the mesh's DNS server".to_owned();
            let _ = failing.send(Report::Failed(Error::System { what, cause: source }));
        }
    });
    mesh.publish();
    let control = SocketAddr::from((BRIDGE, CONTROL_ADMIN_PORT));
    tokio::spawn(mesh.run(reader, told));
    Ok(Started { state: watched, reports: reported, control })
}

impl Mesh {
    async fn run(mut self, mut reader: Reader, mut told: mpsc::UnboundedReceiver<((String, String), Event)>) {
        let (control_tell, mut control_told) = mpsc::unbounded_channel();
        let (_running, stop) = watch::channel(None);
        if let Some(control) = programs::control(&self.settings) {
            tokio::spawn(async move {
                process::keep(&control, stop, |outcome| {
                    let _ = control_tell.send(outcome);
                })
                .await;
            });
            // Sidecars need its root certificate, and would only be refused until it listens.
            self.wait_for_control(&mut control_told).await;
        }
        self.settle();
        let mut last = Instant::now();
        loop {
            tokio::select! {
                Some((key, event)) = told.recv() => {
                    self.hear(&key, event);
                    // Many pods start at once; their news is worked off in one go.
                    while let Ok((key, event)) = told.try_recv() {
                        self.hear(&key, event);
                    }
                }
                Some(outcome) = control_told.recv() => self.hear_control(outcome),
                () = sleep(LOOK.saturating_sub(last.elapsed())) => {
                    last = Instant::now();
                    match reader.read() {
                        Ok(true) => self.objects = reader.objects(),
                        Ok(false) => {}
                        Err(error) => self.note(format!("cannot read the configuration: {error}")),
                    }
                }
            }
            self.settle();
        }
    }

    async fn wait_for_control(&mut self, told: &mut mpsc::UnboundedReceiver<Outcome>) {
        let admin = SocketAddr::from((BRIDGE, CONTROL_ADMIN_PORT));
        let root = self.settings.folder.join("ca/root-cert.pem");
        loop {
            while let Ok(outcome) = told.try_recv() {
                self.hear_control(outcome);
            }
            let answer = http::get(admin, "/ready", Duration::from_secs(1)).await;
            if matches!(answer, Ok((200, _))) && root.exists() {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn hear_control(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Started(id) => self.control_process = Some(id),
            Outcome::Ended(how) => {
                self.control_process = None;
                let log = self.settings.folder.join("logs/control.log");
                let line = last_line(&log);
                self.say(format!("the control plane ended ({how}) and is started again: {line}"));
            }
        }
    }

    fn hear(&mut self, key: &(String, String), event: Event) {
        let Some(member) = self.pods.get_mut(key) else { return };
        let state = &mut member.state;
        match event {
            Event::Made(handles) => state.handles = Some(handles),
            Event::Ready(ready) => state.ready = ready,
            Event::Started(program, id) => {
                match state.programs.iter_mut().find(|known| known.name == program) {
                    Some(known) => {
                        known.process = Some(id);
                        state.restarts += 1;
                    }
                    None => state.programs.push(ProgramState { name: program, process: Some(id) }),
                }
            }
            Event::Ended(program, how) => {
                if let Some(known) = state.programs.iter_mut().find(|known| known.name == program) {
                    known.process = None;
                }
                let line = last_line(&state.logs.join(format!("{program}.log")));
                let text =
                    format!("{}/{}: {program} ended ({how}) and is started again: {line}", key.0, key.1);
                member.failures.push_back(text.clone());
                // The first failures say it all; a program that never runs must not fill the screen.
                if member.failures.len() <= 3 {
                    self.say(text);
                }
            }
            Event::Failed(error) => {
                let _ = self.reports.send(Report::Failed(error));
            }
            Event::Gone => {
                self.pods.remove(key);
            }
        }
    }

    /// Starts the pods that are missing and ends those that are not wanted, then tells everybody.
    fn settle(&mut self) {
        for note in self.objects.notes.clone() {
            self.note(note);
        }
        self.end_removed();
        let workloads: Vec<Workload> = self.objects.workloads.values().cloned().collect();
        for workload in workloads {
            self.settle_workload(&workload);
        }
        let now = Instant::now();
        for member in self.pods.values_mut() {
            if !member.told && member.leaving.is_some_and(|since| now >= since + UNPUBLISHED) {
                member.told = true;
                let grace = member.pod.spec.termination_grace_period_seconds.unwrap_or(GRACE);
                member.running.order(Order::Stop(Duration::from_secs(grace)));
            }
        }
        self.publish();
    }

    fn end_removed(&mut self) {
        let workloads = &self.objects.workloads;
        for member in self.pods.values_mut() {
            let pod = &member.pod;
            let key = (pod.namespace.clone(), pod.kind.clone(), pod.workload.clone());
            if !workloads.contains_key(&key) {
                member.leaving.get_or_insert_with(Instant::now);
            }
        }
    }

    fn settle_workload(&mut self, workload: &Workload) {
        let same = |member: &Member| {
            let pod = &member.pod;
            (&pod.namespace, &pod.kind, &pod.workload)
                == (&workload.namespace, &workload.kind, &workload.name)
        };
        let wanted = workload.replicas as usize;
        let mut current: Vec<&mut Member> = (self.pods.values_mut())
            .filter(|member| same(member) && member.leaving.is_none() && member.pod.hash == workload.hash)
            .collect();
        current.sort_by_key(|member| member.rank());
        for member in current.iter_mut().skip(wanted) {
            member.leaving = Some(Instant::now());
        }
        current.truncate(wanted);
        let ready = current.iter().filter(|member| member.state.ready.is_ok()).count();
        for _ in current.len()..wanted {
            // A pod with a fixed name must be gone before the next of that name can be.
            let Some(name) = self.free_name(workload) else { break };
            if let Err(error) = self.make(workload, name) {
                let _ = self.reports.send(Report::Failed(error));
                return;
            }
        }
        let fixed = matches!(workload.kind.as_str(), "Pod" | "StatefulSet");
        if ready >= wanted || fixed {
            for member in self.pods.values_mut().filter(|m| same(m) && m.pod.hash != workload.hash) {
                member.leaving.get_or_insert_with(Instant::now);
            }
        }
    }

    fn free_name(&self, workload: &Workload) -> Option<String> {
        let Workload { kind, namespace, name, hash, .. } = workload;
        let free = |name: &String| !self.pods.contains_key(&(namespace.clone(), name.clone()));
        match kind.as_str() {
            "Pod" => Some(name.clone()).filter(free),
            "StatefulSet" => (0..workload.replicas).map(|ordinal| format!("{name}-{ordinal}")).find(free),
            _ => {
                let suffix = |n: u32| letters(fnv(format!("{namespace}/{name}/{hash}/{n}").as_bytes()), 5);
                let middle = if kind == "Deployment" { format!("-{hash}") } else { String::new() };
                (0..).map(|n| format!("{name}{middle}-{}", suffix(n))).find(free)
            }
        }
    }

    /// The next address nobody has: used ones rest as long as possible.
    fn free_address(&mut self) -> Ipv4Addr {
        let taken: BTreeSet<Ipv4Addr> = self.pods.values().map(|member| member.pod.address).collect();
        loop {
            self.made += 1;
            let [_, _, c, d] = (self.made % 0xfffe + 1).to_be_bytes();
            let [a, b, ..] = POD_NETWORK.0.octets();
            let address = Ipv4Addr::new(a, b, c, d);
            if address != BRIDGE && !taken.contains(&address) {
                return address;
            }
        }
    }

    fn make(&mut self, workload: &Workload, name: String) -> Result<(), Error> {
        if self.pods.len() >= MOST_PODS {
            return Err(Error::Refused(format!("one mesh runs at most {MOST_PODS} pods")));
        }
        let address = self.free_address();
        let mut pod = Pod::new(workload, name, address, &self.objects.namespaces);
        pod.sidecar &= !self.settings.proxy.is_empty();
        let key = (pod.namespace.clone(), pod.name.clone());
        let folder = self.settings.folder.join("pods").join(&key.0).join(&key.1);
        let logs = self.settings.folder.join("logs").join(&key.0).join(&key.1);
        let (exceptions, problems) = Exceptions::read(&pod.annotations);
        let about = format!("{} {}/{}", pod.kind, pod.namespace, pod.workload);
        problems.into_iter().for_each(|problem| self.note(format!("{about}: {problem}")));
        if pod.spec.host_network {
            self.note(format!(
                "{about}: hostNetwork has no meaning here: it gets a pod's network, and no sidecar"
            ));
        }
        if !pod.spec.init_containers.is_empty() {
            self.note(format!("{about}: initContainers are not run here"));
        }
        let (programs, probes, notes) = programs::containers(&self.settings, &self.objects, &pod, &logs);
        notes.into_iter().for_each(|note| self.note(note));
        let rules =
            if pod.sidecar { rules::interception(&exceptions, MARK, BRIDGE) } else { Rules::default() };
        let blueprint = Blueprint {
            key: key.clone(),
            account: pod.account.clone(),
            address,
            prefix: POD_NETWORK.1,
            gateway: BRIDGE,
            bridge: self.bridge,
            link: format!("pod{}", self.made),
            domain: DOMAIN,
            issuer: self.issuer.clone(),
            rules: self.with_services(&pod, rules),
            sidecar: programs::sidecar(&self.settings, &pod, &folder, &logs)?,
            programs,
            probes,
            folder,
        };
        let state = PodState {
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            kind: pod.kind.clone(),
            workload: pod.workload.clone(),
            address: address.to_string(),
            sidecar: pod.sidecar,
            ready: Err("starting".to_owned()),
            restarts: 0,
            logs,
            programs: Vec::new(),
            handles: None,
        };
        let running = Running::start(blueprint, self.tell.clone()).context("starting a pod's thread")?;
        let member = Member {
            pod,
            number: self.made,
            running,
            state,
            leaving: None,
            told: false,
            failures: VecDeque::new(),
        };
        self.pods.insert(key, member);
        Ok(())
    }

    /// Adds virtual addresses to a pod's rules: all where there is no sidecar, and else UDP, which sidecars leave.
    fn with_services(&self, pod: &Pod, mut rules: Rules) -> Rules {
        let ports = self.virtual_ports.iter().filter(|port| port.udp || !pod.sidecar);
        rules.output.extend(rules::services(ports));
        rules
    }

    /// Writes what follows from the pods' state, wherever it changed.
    fn publish(&mut self) {
        let pods: Vec<(&Pod, bool)> = (self.pods.values())
            .map(|member| (&member.pod, member.leaving.is_none() && member.state.ready.is_ok()))
            .collect();
        let services = &self.objects.services;
        let addresses = self.addresses.assign(services);
        let names = plan::names(services, addresses, &pods);
        let virtual_ports = plan::virtual_ports(services, addresses, &pods);
        let pod_objects = documents(pods.iter().map(|(pod, ready)| pod.object(*ready)));
        // Where the user gave the address, the user's own object stands, and complaints name the user's file.
        let service_objects = documents(addresses.iter().filter_map(|(key, address)| {
            let service = services.get(key).filter(|service| service.own_address().is_none())?;
            Some(service.completed(*address))
        }));
        self.names.replace(names);
        self.write("generated/services.yaml", service_objects);
        self.write("generated/pods.yaml", pod_objects);
        if self.virtual_ports != virtual_ports {
            self.virtual_ports = virtual_ports;
            for member in self.pods.values() {
                let (exceptions, _) = Exceptions::read(&member.pod.annotations);
                let own = match member.pod.sidecar {
                    true => rules::interception(&exceptions, MARK, BRIDGE),
                    false => Rules::default(),
                };
                if !member.pod.sidecar || self.virtual_ports.iter().any(|port| port.udp) {
                    member.running.order(Order::Rules(self.with_services(&member.pod, own)));
                }
            }
        }
        let pods = self.pods.values().filter(|member| member.leaving.is_none());
        let state = State {
            name: self.settings.name.clone(),
            process: self.process,
            control: self.control_process,
            pods: pods.map(|member| member.state.clone()).collect(),
        };
        let text = serde_json::to_string_pretty(&state).unwrap_or_default();
        self.write("state.json", text);
        self.state.send_if_modified(|old| {
            let changed = *old != state;
            *old = state;
            changed
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

    /// Says something once.
    fn note(&mut self, text: String) {
        if self.noted.insert(text.clone()) {
            self.say(text);
        }
    }

    fn say(&self, text: String) {
        let _ = self.reports.send(Report::Note(text));
    }
}

impl Member {
    /// Which pods stay when there are to be fewer: those that serve, and of them the older ones. A StatefulSet's
    /// go from its highest ordinal down.
    fn rank(&self) -> (u32, bool, u32) {
        let ordinal = match self.pod.kind.as_str() {
            "StatefulSet" => self.pod.name.rsplit('-').next().and_then(|ordinal| ordinal.parse().ok()),
            _ => None,
        };
        (ordinal.unwrap_or_default(), self.state.ready.is_err(), self.number)
    }
}

/// Objects as a stream of YAML documents, each of which is JSON.
fn documents(objects: impl Iterator<Item = serde_json::Value>) -> String {
    objects.map(|object| format!("---\n{object}\n")).collect()
}

/// What a program said last: mostly why it ended.
fn last_line(log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    line.map_or_else(|| format!("nothing in {}", log.display()), str::to_owned)
}

/// Asks a pod's sidecar for its metrics.
///
/// # Errors
/// When it does not answer.
pub async fn metrics(pod: &PodState) -> io::Result<String> {
    let address: Ipv4Addr = pod.address.parse().map_err(io::Error::other)?;
    let to = SocketAddr::from((address, skysail_core::names::METRICS_PORT));
    http::get(to, "/stats/prometheus", Duration::from_secs(2)).await.map(|(_, body)| body)
}
