//! The state of the mesh at one version: the World, the compiled scopes and views, and the connected proxies.
//!
//! All methods return quickly, except [`State::prepare`](super::views), which may compile a view's own resources. It
//! only reads, so it runs concurrently for many proxies.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use skysail_core::fingerprint;
use skysail_model::{
    ChangeSet, ClientScope, Diagnostic, Files, Grouping, NamespaceFacts, Parsed, ProxyView, World,
};
use skysail_source::{FileChange, FileState};

use super::{
    change_log::{AppliedChange, ChangeLog},
    compiler::CompilePanic,
    identities::{DeclaredViews, IdentityUsage},
    nodes::NodeName,
    objects::ObjectGenerations,
    registrations::Registrations,
    scopes::ScopeEntry,
    status::SharedStatus,
    views::ViewEntry,
};
use crate::platform::Platform;

#[derive(Default)]
pub(super) struct State {
    pub(super) world: World,
    pub(super) files: Files,
    /// Last published changes of the configuration.
    pub(super) change_log: ChangeLog,
    pub(super) platform: Arc<Platform>,
    /// Files of the published configuration, with the fingerprints of their texts.
    pub(super) fingerprints: BTreeMap<String, u64>,
    /// Files whose changes are not published yet, with the fingerprints of their texts; `None` for a deleted file.
    arrived: Vec<(String, Option<u64>)>,
    /// Files that cannot be read, with the reasons.
    pub(super) unreadable: BTreeMap<String, String>,
    /// Findings about the World. Each view has its own findings.
    pub(super) findings: Vec<Diagnostic>,
    /// The files at the start have been read.
    pub(super) is_loaded: bool,
    /// Number of changes of the World so far.
    pub(super) revision: u64,
    /// Last published generation. New proxies receive this generation; compilations for connected proxies produce the
    /// next one.
    pub(super) generation: u64,
    /// Properties of the World by which views are assigned to scopes.
    pub(super) grouping: Grouping,
    /// Resources may depend on the nodes of proxies.
    pub(super) uses_nodes: bool,
    /// What may differ between namespaces at this revision; computed on first use.
    pub(super) facts: Arc<OnceLock<NamespaceFacts>>,
    pub(super) scopes: HashMap<Arc<ClientScope>, ScopeEntry>,
    pub(super) last_scope_id: u64,
    pub(super) views: HashMap<Arc<ProxyView>, ViewEntry>,
    pub(super) clients: BTreeMap<u64, ClientEntry>,
    pub(super) last_client_id: u64,
    pub(super) registrations: Registrations,
    pub(super) identities: IdentityUsage,
    pub(super) declared_views: DeclaredViews,
    /// Generations of changed objects, for their status.
    pub(super) object_generations: ObjectGenerations,
    /// Findings that are in the log and still hold.
    pub(super) logged_findings: BTreeSet<Diagnostic>,
    /// The control plane is shutting down.
    pub(super) is_closed: bool,
}

/// A connected proxy.
pub(super) struct ClientEntry {
    pub(super) view: Arc<ProxyView>,
    /// Name of its Kubernetes node.
    pub(super) node: NodeName,
    /// Name of its pod.
    pub(super) pod: Box<str>,
    /// Addresses that it declared.
    pub(super) ips: Box<[IpAddr]>,
    /// Identity to whose limits it counts.
    pub(super) accounted_to: Arc<str>,
    pub(super) status: SharedStatus,
}

impl State {
    pub(super) fn new(files: Files, world: World) -> Self {
        Self { files, world, ..Self::default() }
    }

    /// Notes that the changes of all files that have arrived are published.
    pub(super) fn publish_files(&mut self) {
        for (path, fingerprint) in std::mem::take(&mut self.arrived) {
            match fingerprint {
                Some(fingerprint) => _ = self.fingerprints.insert(path, fingerprint),
                None => _ = self.fingerprints.remove(&path),
            }
        }
    }

    /// Returns the number of files whose changes are not published yet.
    pub(super) fn arrived_files(&self) -> usize {
        self.arrived.len()
    }

    /// Applies changed files with their parsed contents. Returns the changes of the World.
    pub(super) fn apply_files(
        &mut self,
        changes: Vec<FileChange>,
        parsed: Vec<Result<Parsed, CompilePanic>>,
    ) -> Vec<AppliedChange> {
        let mut applied = Vec::new();
        for (FileChange { layer, path, state }, parsed) in changes.into_iter().zip(parsed) {
            self.unreadable.remove(&path);
            let changes = match (state, parsed) {
                (FileState::Text(text), Ok(parsed)) => {
                    self.arrived.push((path.clone(), Some(fingerprint(&text))));
                    self.files.take(layer, &path, parsed)
                }
                (FileState::Text(_), Err(panic)) => {
                    let reason = format!("the parser panicked, which is a bug in skysaild: {panic}");
                    self.unreadable.insert(path, reason);
                    continue;
                }
                (FileState::Deleted, _) => {
                    self.arrived.push((path.clone(), None));
                    self.files.remove(layer, &path)
                }
                (FileState::Unreadable(reason), _) => {
                    self.unreadable.insert(path, reason);
                    continue;
                }
            };
            for change in changes {
                self.platform.apply(&change);
                applied.extend(AppliedChange::apply(change, &path, &mut self.world));
            }
        }
        self.platform.configure(self.world.mesh());
        applied
    }

    /// Marks the scopes and views that the last changes of the World may affect.
    pub(super) fn mark_changes(&mut self, cluster_id: &str) {
        self.revision += 1;
        self.facts = Arc::default();
        let mut changes = self.world.take_changes();
        self.end_outdated_views(&changes, cluster_id);
        changes.pods.clear();
        changes.addresses.clear();
        let uses_nodes = self.world.uses_nodes();
        if uses_nodes && !self.uses_nodes {
            self.scopes.values_mut().for_each(|entry| entry.has_new_nodes = true);
        }
        self.uses_nodes = uses_nodes;
        let grouping = self.world.grouping();
        if self.grouping != grouping {
            // Changed Sidecars only move views to other scopes; scopes with the same views as before stay as they are.
            let by_sidecars = self.grouping.differs_by_sidecars(&grouping) && !changes.everything;
            self.grouping = grouping;
            self.regroup(by_sidecars);
            changes.everything |= !by_sidecars;
        }
        if changes.everything {
            changes = ChangeSet::everything();
        }
        if changes.is_empty() {
            return;
        }
        let changes = Arc::new(changes);
        if changes.affects_shared() {
            for (scope, entry) in &mut self.scopes {
                if entry.is_affected(&self.world, scope, &changes) {
                    entry.add_pending(&changes);
                }
            }
        }
        for (view, entry) in &mut self.views {
            entry.is_stale |= changes.may_affect_own_in(&entry.scope.namespace) && changes.affects_own(view);
            // Stale own resources are compiled as a whole, including the secrets.
            if !entry.is_stale && changes.affects_secrets(view) {
                entry.stale_secrets.extend(changes.secrets.iter().cloned());
            }
        }
    }

    pub(super) fn close(&mut self) {
        self.is_closed = true;
        self.clients.clear();
        self.views.clear();
        self.scopes.clear();
        self.identities.clear();
        self.declared_views = DeclaredViews::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_listed_once_its_changes_are_published() {
        let mut state = State::default();
        let change = |state| FileChange { layer: 0, path: "a.yaml".into(), state };
        let text = change(FileState::Text(String::new()));
        state.apply_files(vec![text], vec![Ok(Parsed::default())]);
        assert!(state.fingerprints.is_empty() && state.arrived_files() == 1);
        state.publish_files();
        assert!(state.fingerprints.contains_key("a.yaml") && state.arrived_files() == 0);
        state.apply_files(vec![change(FileState::Deleted)], vec![Ok(Parsed::default())]);
        assert_eq!(state.fingerprints.len(), 1);
        state.publish_files();
        assert!(state.fingerprints.is_empty());
    }
}
