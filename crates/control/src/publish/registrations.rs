//! Registration of machines: a WorkloadEntry for each connected proxy that names a WorkloadGroup. It is removed when
//! the proxy has had no connection for [`GRACE`].
//!
//! If the group has a probe and the proxy's agent runs it, the entry exists only while the machine is healthy, as in
//! istiod. A connection only stores its last report. One task of the publisher applies the reports.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use skysail_core::logging::printable;
use skysail_model::{
    Kind, World,
    api::{Typed, WorkloadEntry},
};
use tokio::sync::Notify;
use tracing::info;

use super::{NewClient, Publisher, Refused, change_log::AppliedChange, state::State, status::lock};
use crate::rate_limit::Rate;

/// Time after the last disconnection until an entry is removed, as in istiod.
const GRACE: Duration = Duration::from_secs(10);
/// Maximum number of registered entries of an identity, including those within [`GRACE`].
const MAX_ENTRIES: usize = 1_000;
/// Minimum time between two publications of health reports. A proxy may report as often as it wants.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
/// Rate limit of log lines about health changes, for the machines of each identity.
pub(super) const HEALTH_LINES: Rate = Rate { burst: 20.0, per_second: 0.1 };

/// Registered WorkloadEntry: namespace and name.
type EntryName = (String, String);

/// Registered entries.
#[derive(Debug, Default)]
pub(super) struct Registrations(HashMap<EntryName, Registration>);

#[derive(Debug)]
struct Registration {
    identity: Arc<str>,
    /// Number of open connections.
    connections: usize,
    /// Time of the last disconnection; `None` while a connection is open.
    left: Option<Instant>,
    /// `None` if the proxy does not check its health: the entry then always exists.
    health: Option<Health>,
}

/// Health of a machine.
#[derive(Debug)]
struct Health {
    entry: Typed<WorkloadEntry>,
    /// Health in the last applied report.
    healthy: bool,
    /// The entry is in the World.
    exists: bool,
}

impl Health {
    /// Adds the entry to the World, or removes it from there. Returns whether anything changed.
    fn apply(&mut self, world: &mut World) -> bool {
        let exists = self.healthy || !world.has_probe(&self.entry);
        if exists == self.exists {
            return false;
        }
        self.exists = exists;
        let meta = &self.entry.meta;
        if exists {
            world.register(self.entry.clone())
        } else {
            world.unregister(&meta.namespace, &meta.name)
        }
    }
}

/// Health reports that have not been applied yet: the last one of each machine.
#[derive(Debug, Default)]
pub(super) struct HealthReports {
    last: Mutex<HashMap<EntryName, HealthReport>>,
    arrived: Notify,
}

/// Health report of a machine.
#[derive(Debug)]
struct HealthReport {
    healthy: bool,
    /// Reason why the machine is not healthy.
    reason: Option<String>,
}

impl Registrations {
    /// Counts a connection. `checked` is the entry of a machine whose proxy checks its health. Returns whether the
    /// entry is to be in the World.
    ///
    /// # Errors
    /// Fails with the reason if another identity has the entry, or this identity has too many.
    fn enter(
        &mut self,
        name: &EntryName,
        identity: &Arc<str>,
        checked: Option<Typed<WorkloadEntry>>,
        world: &World,
    ) -> Result<bool, String> {
        if let Some(known) = self.0.get_mut(name) {
            if known.identity != *identity {
                return Err("another identity has registered this WorkloadEntry".to_owned());
            }
            known.connections += 1;
            known.left = None;
            known.health = match (known.health.take(), checked) {
                // The last report stays in effect until the next one.
                (Some(health), Some(entry)) => Some(Health { entry, ..health }),
                (None, Some(entry)) => Some(Health { entry, healthy: true, exists: true }),
                // A further connection without health checks does not end those of the others.
                (Some(health), None) if known.connections > 1 => Some(health),
                (_, None) => None,
            };
            return Ok(known.health.as_ref().is_none_or(|health| health.exists));
        }
        if self.0.values().filter(|known| known.identity == *identity).count() >= MAX_ENTRIES {
            return Err(format!(
                "this identity has {MAX_ENTRIES} registered WorkloadEntries, which is the limit"
            ));
        }
        let health = checked.map(|entry| Health { exists: !world.has_probe(&entry), healthy: false, entry });
        let exists = health.as_ref().is_none_or(|health| health.exists);
        let new = Registration { identity: Arc::clone(identity), connections: 1, left: None, health };
        self.0.insert(name.clone(), new);
        Ok(exists)
    }

    /// Returns whether a report differs from the last applied one of its machine.
    fn has_changed(&self, name: &EntryName, report: &HealthReport) -> bool {
        let health = self.0.get(name).and_then(|known| known.health.as_ref());
        health.is_some_and(|health| health.healthy != report.healthy)
    }

    /// Applies a report. Returns the identity of the machine if its entry was added or removed.
    fn apply_report(
        &mut self,
        name: &EntryName,
        report: &HealthReport,
        world: &mut World,
    ) -> Option<Arc<str>> {
        let Registration { identity, health, .. } = self.0.get_mut(name)?;
        let health = health.as_mut()?;
        health.healthy = report.healthy;
        health.apply(world).then(|| Arc::clone(identity))
    }

    fn leave(&mut self, name: &EntryName, now: Instant) {
        if let Some(known) = self.0.get_mut(name) {
            known.connections = known.connections.saturating_sub(1);
            known.left = (known.connections == 0).then_some(now);
        }
    }

    /// Removes and returns the entries whose proxies have had no connection for [`GRACE`].
    fn expire(&mut self, now: Instant) -> Vec<EntryName> {
        let is_over = |known: &Registration| {
            known.left.is_some_and(|left| now.saturating_duration_since(left) >= GRACE)
        };
        self.0.extract_if(|_, known| is_over(known)).map(|(name, _)| name).collect()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl State {
    /// Adds and removes registered entries after a change of WorkloadGroups. The entry of a group without a probe
    /// exists whatever the health of the machine.
    pub(super) fn apply_probes(&mut self, applied: &[AppliedChange]) {
        if !applied.iter().any(|change| change.object.kind == Kind::WorkloadGroup) {
            return;
        }
        let Self { registrations, world, .. } = self;
        for health in registrations.0.values_mut().filter_map(|known| known.health.as_mut()) {
            health.apply(world);
        }
    }
}

/// Guard of a connection for which an entry is registered.
pub(crate) struct Registered {
    publisher: Arc<Publisher>,
    name: EntryName,
}

impl Registered {
    /// Stores a report of the machine's health for [`Publisher::apply_health_reports`]; it replaces an earlier one.
    /// `error` is the reason why the machine is not healthy, or `None` if it is.
    pub(super) fn report_health(&self, error: Option<&str>) {
        let reports = &self.publisher.health_reports;
        let report = HealthReport { healthy: error.is_none(), reason: error.map(printable) };
        let mut last = lock(&reports.last);
        match last.get_mut(&self.name) {
            Some(earlier) => *earlier = report,
            None => _ = last.insert(self.name.clone(), report),
        }
        drop(last);
        reports.arrived.notify_one();
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.publisher.write().registrations.leave(&self.name, Instant::now());
    }
}

impl Publisher {
    /// Registers a proxy that names a WorkloadGroup. Returns `None` for other proxies.
    ///
    /// # Errors
    /// The group does not exist or is for another service account, the proxy declares no address, or the identity is
    /// not authenticated or may not have the entry.
    pub(super) async fn register(
        self: &Arc<Self>,
        client: &NewClient,
    ) -> Result<Option<Registered>, Refused> {
        let entry = self.read().world.registration(&client.node);
        let Some(entry) = entry.map_err(|error| Refused::Registration(error.to_string()))? else {
            return Ok(None);
        };
        if client.identity.is_empty() {
            let reason = "a proxy is registered only with an authenticated identity; use the TLS port";
            return Err(Refused::Registration(reason.to_owned()));
        }
        let name = (entry.meta.namespace.clone(), entry.meta.name.clone());
        let (publisher, key, identity) = (Arc::clone(self), name.clone(), Arc::clone(&client.accounted_to));
        let is_checked = client.node.reports_health;
        let apply = move || {
            let mut entered = Ok(false);
            let is_new = publisher.change_registered(|state| {
                let checked = is_checked.then(|| entry.clone());
                entered = state.registrations.enter(&key, &identity, checked, &state.world);
                // The labels and the locality may differ from those of an earlier connection.
                entered == Ok(true) && state.world.register(entry)
            });
            entered.map(|_| is_new)
        };
        let entered = tokio::task::spawn_blocking(apply).await;
        let is_new = entered.unwrap_or_else(|_| Err("the registration panicked".to_owned()));
        let is_new = is_new.map_err(Refused::Registration)?;
        if is_new {
            info!(namespace = name.0, entry = name.1, group = client.node.group, "WorkloadEntry registered");
        }
        Ok(Some(Registered { publisher: Arc::clone(self), name }))
    }

    /// Applies the health reports of machines; never returns. Those of one [`HEALTH_INTERVAL`] are applied together.
    pub(crate) async fn follow_health_reports(self: Arc<Self>) {
        loop {
            self.health_reports.arrived.notified().await;
            let applying = Arc::clone(&self);
            // A panic of the compilation does not end this task.
            let _ = tokio::task::spawn_blocking(move || applying.apply_health_reports()).await;
            tokio::time::sleep(HEALTH_INTERVAL).await;
        }
    }

    /// Applies the health reports that have arrived, and publishes the result. Blocks during the compilation.
    pub(super) fn apply_health_reports(&self) {
        let mut reports = std::mem::take(&mut *lock(&self.health_reports.last));
        {
            let state = self.read();
            reports.retain(|name, report| state.registrations.has_changed(name, report));
        }
        if reports.is_empty() {
            return;
        }
        let mut applied = Vec::new();
        self.change_registered(|state| {
            let State { registrations, world, .. } = state;
            applied.extend(reports.into_iter().filter_map(|(name, report)| {
                let identity = registrations.apply_report(&name, &report, world)?;
                Some((identity, name, report))
            }));
            !applied.is_empty()
        });
        let now = Instant::now();
        for (identity, (namespace, entry), HealthReport { healthy, reason }) in applied {
            if let Some(more) = self.health_lines.take(&identity, now) {
                info!(namespace, entry, healthy, reason, more, "health reported");
            }
        }
    }

    /// Removes the entries of proxies that have had no connection for [`GRACE`]. Blocks during the compilation.
    pub(crate) fn expire_registrations(&self, now: Instant) {
        if self.read().registrations.is_empty() {
            return;
        }
        let mut expired = Vec::new();
        self.change_registered(|state| {
            // Under the same lock as the removal from the World, because a proxy may connect again at any time.
            expired = state.registrations.expire(now);
            let mut changed = false;
            for (namespace, name) in &expired {
                changed |= state.world.unregister(namespace, name);
            }
            changed
        });
        if !expired.is_empty() {
            info!(entries = expired.len(), "registered WorkloadEntries removed");
        }
    }

    fn change_registered(&self, change: impl FnOnce(&mut State) -> bool) -> bool {
        let _publishing = lock(&self.publishing);
        let changed = {
            let mut state = self.write();
            let changed = change(&mut state);
            if changed {
                state.mark_changes(&self.settings.cluster_id);
            }
            changed
        };
        if changed {
            self.publish();
        }
        changed
    }
}
