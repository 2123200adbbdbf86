//! Envoy's overload manager: monitors of the resources of the process, and the actions that they trigger. (`overload`
//! sheds the load of a single worker.)
//!
//! Connections are counted as they begin and end. The control thread measures memory and notifies the workers when an
//! action begins or ends, so that requests pay nothing for it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use skysail_core::trim;

use skysail_policy::config::Listener;

/// Number of units of a fraction that equal 1: fractions are in millionths.
const MILLION: f64 = 1_000_000.0;
/// Minimum time between two shrinks of the heap.
const SHRINK_INTERVAL: Duration = Duration::from_secs(10);

/// Settings of the overload manager. Source: `envoy.config.overload.v3.OverloadManager`.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Maximum number of downstream connections, on all listeners that do not ignore the limit.
    pub max_connections: Option<u64>,
    /// Interval at which the monitors measure. Default: 1 s.
    pub interval: Duration,
    /// Monitored resources.
    pub monitors: Vec<Monitor>,
    /// Actions that the monitors trigger.
    pub actions: Vec<Action>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_connections: None, interval: Duration::from_secs(1), monitors: vec![], actions: vec![] }
    }
}

/// A monitored resource.
#[derive(Clone, Debug)]
pub struct Monitor {
    /// Name in the configuration, which triggers refer to.
    pub name: Box<str>,
    /// The resource and its limit.
    pub resource: LimitedResource,
}

/// A resource with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitedResource {
    /// Memory of this process; the limit is in bytes.
    Heap(u64),
    /// Memory of the cgroup; the limit is in bytes. `None`: the limit of the cgroup itself.
    Cgroup(Option<u64>),
}

/// An action that triggers begin and end.
#[derive(Clone, Debug)]
pub struct Action {
    /// Name in the configuration and in statistics.
    pub name: Box<str>,
    /// Effect of the action.
    pub does: ActionEffect,
    /// Triggers; the one with the highest scale decides.
    pub triggers: Vec<Trigger>,
}

/// Effect of an action. Some need saturation, a scale of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionEffect {
    /// New connections wait in the kernel. Needs saturation.
    StopConnections,
    /// A fraction of the new connections, equal to the scale, is closed at once.
    RejectConnections,
    /// New requests are answered with 503. Needs saturation.
    StopRequests,
    /// Freed memory is returned to the system. Needs saturation.
    ShrinkHeap,
}

/// A condition on a monitor. `from` and `to` are equal for a threshold trigger.
#[derive(Clone, Copy, Debug)]
pub struct Trigger {
    /// Index of the monitor.
    pub monitor: usize,
    /// Pressure, from 0 to 1, above which the action begins.
    pub from: f64,
    /// Pressure at which the scale is 1.
    pub to: f64,
}

impl Trigger {
    /// Returns the scale of the action, from 0 to 1.
    fn scale(self, pressure: f64) -> f64 {
        if pressure >= self.to {
            1.0
        } else if pressure <= self.from {
            0.0
        } else {
            (pressure - self.from) / (self.to - self.from)
        }
    }
}

/// The actions in effect. Workers read them for each connection, never for a request.
#[derive(Debug)]
pub struct OverloadActions {
    settings: Settings,
    connections: AtomicU64,
    stopped: AtomicBool,
    /// Fraction of new connections to close, in millionths.
    rejected: AtomicU32,
    /// Pressure of each monitor, in millionths.
    pressures: Vec<AtomicU32>,
    /// Scale of each action, in millionths.
    scales: Vec<AtomicU32>,
}

impl Default for OverloadActions {
    fn default() -> Self {
        Self::of(Settings::default())
    }
}

/// The decision about a new connection.
#[derive(Debug)]
pub(crate) enum Acceptance {
    /// The connection is served, and counts against the limit until this is dropped.
    Counted(Admitted),
    /// The connection is served and does not count.
    Free,
    /// The limit is reached: the connection is closed.
    TooMany,
    /// An action closes the connection.
    Rejected,
}

/// Counts a connection against the limit while this lives.
#[derive(Debug)]
pub(crate) struct Admitted(Arc<OverloadActions>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

impl OverloadActions {
    pub(crate) fn of(settings: Settings) -> Self {
        let zeros = |count| (0..count).map(|_| AtomicU32::new(0)).collect();
        Self {
            connections: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            rejected: AtomicU32::new(0),
            pressures: zeros(settings.monitors.len()),
            scales: zeros(settings.actions.len()),
            settings,
        }
    }

    /// Returns whether new connections wait in the kernel.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Returns whether every connection is accepted without being counted.
    pub(crate) fn is_free(&self) -> bool {
        self.settings.max_connections.is_none() && self.rejected.load(Relaxed) == 0
    }

    /// Decides about a new connection. `random` returns a random number from 0 to 1.
    pub(crate) fn admit(
        self: &Arc<Self>,
        listener: Option<&Listener>,
        random: impl FnOnce() -> f64,
    ) -> Acceptance {
        let rejected = self.rejected.load(Relaxed);
        let bypasses = listener.is_some_and(|listener| listener.bypass_overload);
        if rejected > 0 && !bypasses && random() * MILLION < f64::from(rejected) {
            return Acceptance::Rejected;
        }
        let Some(max) = self.settings.max_connections else { return Acceptance::Free };
        if listener.is_some_and(|listener| listener.ignore_connection_limit) {
            return Acceptance::Free;
        }
        let admitted = Admitted(Arc::clone(self));
        if self.connections.fetch_add(1, Relaxed) < max {
            Acceptance::Counted(admitted)
        } else {
            // Dropping `admitted` undoes the count.
            Acceptance::TooMany
        }
    }

    /// Returns the names and values of the statistics.
    pub(crate) fn stats(&self) -> impl Iterator<Item = (String, u64)> {
        let percent = |value: &AtomicU32| u64::from(value.load(Relaxed)) / 10_000;
        let monitors = self.settings.monitors.iter().zip(&self.pressures);
        let monitors =
            monitors.map(move |(it, value)| (format!("overload.{}.pressure", it.name), percent(value)));
        let actions = self.settings.actions.iter().zip(&self.scales).flat_map(move |(it, value)| {
            let scale = percent(value);
            [("active", u64::from(scale == 100)), ("scale_percent", scale)]
                .map(|(what, value)| (format!("overload.{}.{what}", it.name), value))
        });
        monitors.chain(actions)
    }

    /// Measures the monitors at each interval, forever; returns at once if there are none. `refuse` makes the workers
    /// refuse all requests, or no longer.
    pub(crate) async fn watch(&self, refuse: impl AsyncFn(bool)) {
        if self.settings.monitors.is_empty() {
            return;
        }
        let mut looks = tokio::time::interval(self.settings.interval);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut refusing, mut failed, mut shrunk) = (false, false, None::<tokio::time::Instant>);
        loop {
            looks.tick().await;
            for (monitor, pressure) in self.settings.monitors.iter().zip(&self.pressures) {
                match measure(monitor.resource) {
                    Ok(now) => pressure.store(millionths(now), Relaxed),
                    Err(error) if !std::mem::replace(&mut failed, true) => {
                        tracing::warn!(
                            monitor = &*monitor.name,
                            error,
                            "resource monitor cannot measure; its last value stays in effect"
                        );
                    }
                    Err(_) => {}
                }
            }
            let done = self.decide();
            self.stopped.store(done(ActionEffect::StopConnections) == 1.0, Relaxed);
            self.rejected.store(millionths(done(ActionEffect::RejectConnections)), Relaxed);
            let refused = done(ActionEffect::StopRequests) == 1.0;
            if refused != std::mem::replace(&mut refusing, refused) {
                refuse(refused).await;
            }
            let due = shrunk.is_none_or(|at| at.elapsed() >= SHRINK_INTERVAL);
            if done(ActionEffect::ShrinkHeap) == 1.0 && due {
                shrunk = Some(tokio::time::Instant::now());
                trim::heap();
            }
        }
    }

    /// Computes the scale of each action, and logs the actions that begin or end. Returns the scale of an effect.
    fn decide(&self) -> impl Fn(ActionEffect) -> f64 {
        let mut all = Vec::new();
        for (action, known) in self.settings.actions.iter().zip(&self.scales) {
            let pressure =
                |trigger: &Trigger| f64::from(self.pressures[trigger.monitor].load(Relaxed)) / MILLION;
            let scales = action.triggers.iter().map(|trigger| trigger.scale(pressure(trigger)));
            let scale = scales.fold(0.0, f64::max);
            let before = known.swap(millionths(scale), Relaxed);
            match (before > 0, scale > 0.0) {
                (false, true) => {
                    tracing::warn!(
                        action = &*action.name,
                        scale,
                        "overload action begins: a monitor is above its threshold"
                    );
                }
                (true, false) => {
                    tracing::info!(action = &*action.name, "overload action ends");
                }
                _ => {}
            }
            all.push((action.does, scale));
        }
        move |does| all.iter().filter(|(it, _)| *it == does).map(|(_, scale)| *scale).fold(0.0, f64::max)
    }
}

/// Converts a fraction to millionths. A value above 1 counts as 1: memory may be above its limit.
fn millionths(fraction: f64) -> u32 {
    (fraction.clamp(0.0, 1.0) * MILLION).round() as u32
}

/// Returns the fraction of a resource that is in use.
fn measure(resource: LimitedResource) -> Result<f64, String> {
    let number = |path: &str| -> Result<u64, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
        match text.trim() {
            "max" => Ok(u64::MAX),
            number => number.parse().map_err(|error| format!("{path}: {error}")),
        }
    };
    let (used, limit) = match resource {
        LimitedResource::Heap(limit) => (resident()?, limit),
        LimitedResource::Cgroup(configured) => {
            let (used, limit) = match number("/sys/fs/cgroup/memory.current") {
                Ok(used) => (used, number("/sys/fs/cgroup/memory.max")?),
                Err(_) => (
                    number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?,
                    number("/sys/fs/cgroup/memory/memory.limit_in_bytes")?,
                ),
            };
            (used, configured.map_or(limit, |configured| configured.min(limit)))
        }
    };
    Ok(used as f64 / limit.max(1) as f64)
}

/// Returns the resident memory of this process in bytes, without file mappings.
fn resident() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| "/proc/self/status has no RssAnon".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pressure(max: Option<u64>, actions: Vec<Action>) -> Arc<OverloadActions> {
        let monitors = vec![Monitor { name: "m".into(), resource: LimitedResource::Heap(1) }];
        Arc::new(OverloadActions::of(Settings {
            max_connections: max,
            monitors,
            actions,
            ..Settings::default()
        }))
    }

    #[test]
    fn connections_count_until_they_end() {
        let pressure = pressure(Some(2), vec![]);
        let admit = || pressure.admit(None, || 0.0);
        let first = admit();
        let _second = admit();
        assert!(matches!(first, Acceptance::Counted(_)) && matches!(admit(), Acceptance::TooMany));
        drop(first);
        assert!(matches!(admit(), Acceptance::Counted(_)));
    }

    #[test]
    fn the_trigger_with_the_highest_scale_decides() {
        let triggers =
            vec![Trigger { monitor: 0, from: 0.5, to: 0.9 }, Trigger { monitor: 0, from: 0.8, to: 0.8 }];
        let action = Action { name: "a".into(), does: ActionEffect::RejectConnections, triggers };
        let pressure = pressure(None, vec![action]);
        let at = |fraction: f64| {
            pressure.pressures[0].store(millionths(fraction), Relaxed);
            pressure.decide()(ActionEffect::RejectConnections)
        };
        assert_eq!((at(0.5), at(0.8), at(0.95)), (0.0, 1.0, 1.0));
        assert!((at(0.6) - 0.25).abs() < 0.001);
        assert_eq!(pressure.decide()(ActionEffect::StopRequests), 0.0);
        assert!(pressure.stats().any(|(name, value)| name == "overload.a.scale_percent" && value == 25));
        assert!(measure(LimitedResource::Heap(1)).unwrap() > 1.0);
    }
}
