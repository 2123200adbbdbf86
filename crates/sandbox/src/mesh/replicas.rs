//! The pods of workloads: creation of missing ones and removal of those that are not wanted.
//!
//! A pod is removed in two steps. First it is withdrawn as an endpoint. When all sidecars have acknowledged that, it is
//! stopped with its grace period.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::Ipv4Addr,
    path::PathBuf,
    sync::{Arc, Weak},
    time::Duration,
};

use skysail_core::names::CONTROL_ADMIN_PORT;
use tokio::time::{Instant, sleep, timeout};

use super::{Mesh, Report, rules_of};
use crate::{
    containers::PodFolders,
    error::{Context as _, Error},
    mounts,
    names::DOMAIN,
    networks::{BRIDGE, POD_NETWORK},
    objects::{Key, Workload, encode_hash, fnv},
    plan::Pod,
    pod::{PodCommand, PodConfig, PodHandle},
    programs::{self, GRACE, Programs},
    progress, proxy_metadata, rules,
    rundir::{CLAIMS, Phase, PodState},
    volumes::{self, Contents, DEFAULT_SIZE, VolumeKind, store::VolumeSetup},
};

/// Timeout for all sidecars to acknowledge that a pod is removed.
const FAREWELL: Duration = Duration::from_secs(10);
/// Interval at which packet rules are checked for being in effect.
const RULES_INTERVAL: Duration = Duration::from_millis(10);
/// Time after which a pod that is neither ready nor failed no longer delays the start of others.
const STARTING: Duration = Duration::from_secs(5);
/// Maximum number of pods that start at the same time, per CPU.
const STARTS_PER_CPU: usize = 4;

/// A pod and its state.
pub(super) struct Replica {
    pub(super) pod: Pod,
    /// Sequence number; later pods have higher ones.
    pub(super) number: u32,
    pub(super) running: PodHandle,
    pub(super) state: PodState,
    pub(super) stage: Stage,
    /// Time at which it was created.
    pub(super) created_at: Instant,
    /// True once it was ready or has failed: it then uses no more of the machine than others.
    pub(super) has_started: bool,
    /// Number of times that its programs have ended.
    pub(super) failures: u32,
    /// Volumes that its programs mount.
    volumes: BTreeSet<String>,
    /// Files that were last sent for these volumes.
    contents: Contents,
}

/// Step of a pod's removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The pod is wanted.
    Wanted,
    /// The pod serves requests, and is being withdrawn as an endpoint.
    Leaving,
    /// The pod was asked to stop.
    Ending,
}

/// Pods that may stop.
pub(super) struct Removal {
    pods: Vec<(String, String)>,
    /// True if all sidecars have acknowledged the removal.
    known: bool,
}

impl Mesh {
    pub(super) fn end_removed(&mut self) {
        let workloads = &self.objects.workloads;
        for replica in self.pods.values_mut() {
            let pod = &replica.pod;
            let key = (pod.namespace.clone(), pod.kind.clone(), pod.workload.clone());
            if !workloads.contains_key(&key) {
                replica.leave();
            }
        }
    }

    pub(super) fn reconcile_workload(&mut self, workload: &Workload) {
        let same = |replica: &Replica| {
            let pod = &replica.pod;
            (&pod.namespace, &pod.kind, &pod.workload)
                == (&workload.namespace, &workload.kind, &workload.name)
        };
        let wanted = workload.replicas as usize;
        let mut current: Vec<&mut Replica> = (self.pods.values_mut())
            .filter(|replica| {
                same(replica) && replica.stage == Stage::Wanted && replica.pod.hash == workload.hash
            })
            .collect();
        current.sort_by_key(|replica| replica.rank());
        for replica in current.iter_mut().skip(wanted) {
            replica.leave();
        }
        current.truncate(wanted);
        let ready = current.iter().filter(|replica| replica.state.ready.is_ok()).count();
        let running = current.iter().filter(|replica| replica.state.phase == Phase::Running).count();
        let missing = match workload.kind.as_str() {
            "Job" => (wanted - current.len()).min((workload.parallelism as usize).saturating_sub(running)),
            _ => wanted - current.len(),
        };
        for started in 0..missing {
            if self.pods.len() >= self.settings.max_pods {
                self.refused.push(format!(
                    "{} {}/{}: {} of {wanted} pods are not started, because the mesh is limited to {} pods; \
                     lower `replicas` or raise --max-pods",
                    workload.kind,
                    workload.namespace,
                    workload.name,
                    missing - started,
                    self.settings.max_pods
                ));
                break;
            }
            // The remaining pods start when these have started.
            if self.starting() >= max_starting() {
                break;
            }
            // A pod with a fixed name must have ended before the next one of that name can start.
            let Some(name) = self.free_name(workload) else { break };
            if let Err(error) = self.make(workload, name) {
                let _ = self.reports.send(Report::Failed(error));
                return;
            }
        }
        let fixed = matches!(workload.kind.as_str(), "Pod" | "StatefulSet" | "Job");
        if ready >= wanted || fixed {
            for replica in self.pods.values_mut().filter(|m| same(m) && m.pod.hash != workload.hash) {
                replica.leave();
            }
        }
    }

    /// Returns the number of pods that are starting.
    pub(super) fn starting(&self) -> usize {
        self.pods
            .values()
            .filter(|replica| !replica.has_started && replica.created_at.elapsed() < STARTING)
            .count()
    }

    fn free_name(&self, workload: &Workload) -> Option<String> {
        let Workload { kind, namespace, name, hash, .. } = workload;
        let free = |name: &String| !self.pods.contains_key(&(namespace.clone(), name.clone()));
        match kind.as_str() {
            "Pod" => Some(name.clone()).filter(free),
            "StatefulSet" => (0..workload.replicas).map(|ordinal| format!("{name}-{ordinal}")).find(free),
            _ => {
                let suffix =
                    |n: u32| encode_hash(fnv(format!("{namespace}/{name}/{hash}/{n}").as_bytes()), 5);
                let middle = if kind == "Deployment" { format!("-{hash}") } else { String::new() };
                (0..).map(|n| format!("{name}{middle}-{}", suffix(n))).find(free)
            }
        }
    }

    /// Returns the next free address. Released addresses are reused as late as possible.
    fn free_address(&mut self) -> Ipv4Addr {
        let taken: BTreeSet<Ipv4Addr> = self.pods.values().map(|replica| replica.pod.address).collect();
        loop {
            self.created += 1;
            let [_, _, c, d] = (self.created % 0xfffe + 1).to_be_bytes();
            let [a, b, ..] = POD_NETWORK.0.octets();
            let address = Ipv4Addr::new(a, b, c, d);
            if address != BRIDGE && !taken.contains(&address) {
                return address;
            }
        }
    }

    fn make(&mut self, workload: &Workload, name: String) -> Result<(), Error> {
        let address = self.free_address();
        let pod = Pod::new(workload, name, address, &self.objects.namespaces);
        let mut pod = pod.started_by(&self.objects.starts);
        pod.sidecar &= !self.settings.proxy.is_empty();
        let key = (pod.namespace.clone(), pod.name.clone());
        let folder = self.settings.folder.join("pods").join(&key.0).join(&key.1);
        let logs = self.settings.folder.join("logs").join(&key.0).join(&key.1);
        let (_, mut problems) = rules::exceptions(&pod.annotations);
        problems.extend(proxy_metadata::annotated(&pod.annotations).1);
        if pod.sidecar {
            problems.extend(proxy_metadata::of_variables(&pod.settings.variables).1);
        }
        let folders = PodFolders { folder: &folder, logs: &logs };
        let Programs { init, containers, volumes, notes } =
            programs::containers(&self.settings, &self.objects, &pod, folders);
        for note in problems.into_iter().chain(notes) {
            self.note(format!("{}: {note}", pod.about()));
        }
        let contents = volumes::contents(&pod, &volumes, &self.objects);
        self.note_missing(&pod, &contents);
        let config = PodConfig {
            key: key.clone(),
            account: pod.account.clone(),
            address,
            prefix: POD_NETWORK.1,
            gateway: BRIDGE,
            bridge: self.bridge,
            link: format!("pod{}", self.created),
            domain: DOMAIN,
            signer: self.signer.clone(),
            rules: rules_of(&pod, &self.virtual_ports),
            sidecar_drain: programs::drain(&pod),
            sidecar: programs::sidecar(&self.settings, &pod, &folder, &logs)?,
            volumes: self.make_volumes(&pod, &volumes)?,
            contents: contents.clone(),
            init,
            containers,
            folder,
        };
        let state = PodState {
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            kind: pod.kind.clone(),
            workload: pod.workload.clone(),
            account: pod.account.clone(),
            address: address.to_string(),
            sidecar: pod.sidecar,
            phase: Phase::Running,
            ready: Err("starting".to_owned()),
            restarts: 0,
            logs,
            containers: pod.containers().map(|container| container.name.clone()).collect(),
            programs: Vec::new(),
            handles: None,
            mounts: BTreeMap::new(),
        };
        let running =
            PodHandle::start(config, self.event_sender.clone()).context("starting a pod's thread")?;
        let replica = Replica {
            pod,
            number: self.created,
            running,
            state,
            stage: Stage::Wanted,
            created_at: Instant::now(),
            has_started: false,
            failures: 0,
            volumes,
            contents,
        };
        self.pods.insert(key, replica);
        Ok(())
    }

    /// Returns the volumes to create for a pod. Creates the folders of its claims, which outlive the pod.
    fn make_volumes(&mut self, pod: &Pod, names: &BTreeSet<String>) -> Result<Vec<VolumeSetup>, Error> {
        let mut created = Vec::new();
        for (number, volume) in pod.spec.volumes.iter().enumerate() {
            let Some(kind) = volume.kind().filter(|_| names.contains(&volume.name)) else { continue };
            let claim = match &kind {
                VolumeKind::Claim(name) => Some(self.claim((pod.namespace.clone(), name.clone()))?),
                _ => None,
            };
            created.push(VolumeSetup { name: volume.name.clone(), number, kind, claim });
        }
        Ok(created)
    }

    /// Returns the folder of a claim. It is in memory, so that it ends with the mesh.
    fn claim(&mut self, key: Key) -> Result<PathBuf, Error> {
        if let Some(folder) = self.claims.get(&key) {
            return Ok(folder.clone());
        }
        let folder = self.settings.folder.join(CLAIMS).join(self.claims.len().to_string());
        let created = fs::create_dir_all(&folder)
            .and_then(|()| mounts::tmpfs(&folder, &format!("mode=0777,size={DEFAULT_SIZE}")));
        created.context(format!("making a folder for PersistentVolumeClaim {}/{}", key.0, key.1))?;
        self.claims.insert(key, folder.clone());
        Ok(folder)
    }

    /// Reports once the objects that a pod's volumes lack.
    fn note_missing(&mut self, pod: &Pod, contents: &Contents) {
        for (volume, missing) in
            contents.iter().filter_map(|(name, files)| Some((name, files.as_ref().err()?)))
        {
            self.note(format!("{}: volume {volume}: {missing}; its pods wait for it", pod.about()));
        }
    }

    /// Replaces the objects after a change of files, and updates the volumes of pods that mount them.
    pub(super) fn take_objects(&mut self) {
        self.objects = self.files.objects();
        for replica in self.pods.values_mut().filter(|replica| !replica.contents.is_empty()) {
            let contents = volumes::contents(&replica.pod, &replica.volumes, &self.objects);
            if contents != replica.contents {
                replica.contents.clone_from(&contents);
                replica.running.command(PodCommand::Contents(contents));
            }
        }
    }

    /// Starts the removal of pods that are not wanted. They stop when all sidecars have acknowledged the new endpoints,
    /// and the packet rules of pods without a sidecar are in effect. Until then they serve requests.
    pub(super) fn begin_removal(&mut self) {
        let leaving = self.pods.iter().filter(|(_, replica)| replica.stage == Stage::Leaving);
        let pods: Vec<_> = leaving.map(|(key, _)| key.clone()).collect();
        if pods.is_empty() || self.removal_under_way {
            return;
        }
        self.removal_under_way = true;
        let serving =
            self.pods.values().filter(|replica| replica.serves()).map(|replica| replica.state.clone());
        let serving: Vec<PodState> = serving.collect();
        let rules = Arc::downgrade(&self.rules_in_flight);
        let control = (!self.settings.control.is_empty()).then_some((BRIDGE, CONTROL_ADMIN_PORT));
        let (removed, folder) = (self.removal_sender.clone(), self.settings.folder.clone());
        tokio::spawn(async move {
            let known = async {
                in_force(&rules).await;
                if let Some(control) = control {
                    progress::wait_until_answered(control.into(), &folder, &serving).await;
                }
            };
            let known = timeout(FAREWELL, known).await.is_ok();
            // The receiver is dropped when the mesh ends; the pods end with it.
            let _ = removed.send(Removal { pods, known });
        });
    }

    pub(super) fn stop_removed_pods(&mut self, removal: &Removal) {
        self.removal_under_way = false;
        for key in &removal.pods {
            let Some(replica) = self.pods.get_mut(key) else { continue };
            replica.stage = Stage::Ending;
            let grace = replica.pod.spec.termination_grace_period_seconds.unwrap_or(GRACE);
            replica.running.command(PodCommand::Stop(Duration::from_secs(grace)));
        }
        if !removal.known {
            for (namespace, name) in &removal.pods {
                self.say(format!(
                    "{namespace}/{name}: stopped, although some sidecars did not acknowledge its removal within {} s; \
                     requests to it may have failed",
                    FAREWELL.as_secs()
                ));
            }
        }
    }
}

impl Replica {
    /// Returns whether the pod is an endpoint of its Services.
    pub(super) fn serves(&self) -> bool {
        self.stage == Stage::Wanted && self.state.ready.is_ok()
    }

    fn leave(&mut self) {
        if self.stage == Stage::Wanted {
            self.stage = Stage::Leaving;
        }
    }

    /// Returns the order in which pods are kept when there are too many: ready ones first, and older ones first. A
    /// StatefulSet loses its highest ordinals first.
    fn rank(&self) -> (u32, bool, u32) {
        let ordinal = match self.pod.kind.as_str() {
            "StatefulSet" => self.pod.name.rsplit('-').next().and_then(|ordinal| ordinal.parse().ok()),
            _ => None,
        };
        (ordinal.unwrap_or_default(), self.state.ready.is_err(), self.number)
    }
}

/// Returns the maximum number of pods that start at the same time. More of them only delay each other.
fn max_starting() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from) * STARTS_PER_CPU
}

/// Waits until all replaced packet rules are in effect.
async fn in_force(commands: &Weak<()>) {
    // One reference is the mesh's own.
    while commands.strong_count() > 1 {
        sleep(RULES_INTERVAL).await;
    }
}
