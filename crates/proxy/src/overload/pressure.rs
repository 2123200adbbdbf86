//! Resources of the whole process that run short: how short, and what is done about it.
//!
//! This is Envoy's overload manager. (What a worker does by itself when it has more to do than it can is in
//! `overload`.) Connections are counted as they come and go; memory is looked at by the control thread, which tells
//! the workers when an action begins or ends, so that requests pay nothing for it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use skysail_core::trim;

use skysail_policy::config::Listener;

/// A fraction of this many is one.
const WHOLE: f64 = 1_000_000.0;
/// The heap is shrunk at most so often.
const BETWEEN_SHRINKS: Duration = Duration::from_secs(10);

/// What is watched, and what for. Source: `envoy.config.overload.v3.OverloadManager`.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Most connections from clients at once, on all listeners that count.
    pub max_connections: Option<u64>,
    /// Time between two looks at the monitors.
    pub interval: Duration,
    /// What is looked at.
    pub monitors: Vec<Monitor>,
    /// What is done.
    pub actions: Vec<Action>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_connections: None, interval: Duration::from_secs(1), monitors: vec![], actions: vec![] }
    }
}

/// A resource by its name in the configuration.
#[derive(Clone, Debug)]
pub struct Monitor {
    /// The name that triggers use.
    pub name: Box<str>,
    /// What it looks at.
    pub resource: LimitedResource,
}

/// What can run short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitedResource {
    /// This process's memory, with its limit in bytes.
    Heap(u64),
    /// The cgroup's memory, with its limit in bytes; `None` for what the system says.
    Cgroup(Option<u64>),
}

/// What is done when a resource runs short.
#[derive(Clone, Debug)]
pub struct Action {
    /// Its name in the configuration, which its statistics have.
    pub name: Box<str>,
    /// What it does.
    pub does: Does,
    /// The one that is furthest along decides.
    pub triggers: Vec<Trigger>,
}

/// What there is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Does {
    /// Connections wait in the kernel. Needs saturation.
    StopConnections,
    /// A share of the connections is closed at once.
    RejectConnections,
    /// Requests are answered with 503. Needs saturation.
    StopRequests,
    /// Freed memory is given back to the system. Needs saturation.
    ShrinkHeap,
}

/// When an action begins. Both numbers are the same for a threshold.
#[derive(Clone, Copy, Debug)]
pub struct Trigger {
    /// Index of the monitor.
    pub monitor: usize,
    /// The pressure, from 0 to 1, above which it begins.
    pub from: f64,
    /// The pressure at which it is done fully.
    pub to: f64,
}

impl Trigger {
    /// How much is to be done, from 0 to 1.
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

/// What is in force now. Asked by workers for each connection, never for a request.
#[derive(Debug)]
pub struct Pressure {
    settings: Settings,
    connections: AtomicU64,
    stopped: AtomicBool,
    /// Share of connections to close, in millionths.
    rejected: AtomicU32,
    /// Millionths, by monitor and by action.
    pressures: Vec<AtomicU32>,
    scales: Vec<AtomicU32>,
}

impl Default for Pressure {
    fn default() -> Self {
        Self::of(Settings::default())
    }
}

/// What becomes of a connection.
#[derive(Debug)]
pub(crate) enum Acceptance {
    /// It is served, and counts until this is dropped.
    Counted(Admitted),
    /// It is served and does not count.
    Free,
    /// There are too many.
    TooMany,
    /// Memory runs short.
    Rejected,
}

/// A connection that counts.
#[derive(Debug)]
pub(crate) struct Admitted(Arc<Pressure>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Relaxed);
    }
}

impl Pressure {
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

    /// Whether this listener's connections are to wait.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Whether all connections are taken and none counts.
    pub(crate) fn is_free(&self) -> bool {
        self.settings.max_connections.is_none() && self.rejected.load(Relaxed) == 0
    }

    /// Decides about a connection; `roll` gives a number from 0 to 1.
    pub(crate) fn admit(
        self: &Arc<Self>,
        listener: Option<&Listener>,
        roll: impl FnOnce() -> f64,
    ) -> Acceptance {
        let rejected = self.rejected.load(Relaxed);
        let bypasses = listener.is_some_and(|listener| listener.bypass_overload);
        if rejected > 0 && !bypasses && roll() * WHOLE < f64::from(rejected) {
            return Acceptance::Rejected;
        }
        let Some(most) = self.settings.max_connections else { return Acceptance::Free };
        if listener.is_some_and(|listener| listener.ignore_connection_limit) {
            return Acceptance::Free;
        }
        let admitted = Admitted(Arc::clone(self));
        if self.connections.fetch_add(1, Relaxed) < most {
            Acceptance::Counted(admitted)
        } else {
            // Dropping it takes the one back.
            Acceptance::TooMany
        }
    }

    /// Names and values of the statistics.
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

    /// Watches the resources for ever; ends at once if there is nothing to watch. `refuse` has requests refused, or no longer.
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
                            "cannot be measured; what it showed last holds"
                        );
                    }
                    Err(_) => {}
                }
            }
            let done = self.decide();
            self.stopped.store(done(Does::StopConnections) == 1.0, Relaxed);
            self.rejected.store(millionths(done(Does::RejectConnections)), Relaxed);
            let refused = done(Does::StopRequests) == 1.0;
            if refused != std::mem::replace(&mut refusing, refused) {
                refuse(refused).await;
            }
            let due = shrunk.is_none_or(|at| at.elapsed() >= BETWEEN_SHRINKS);
            if done(Does::ShrinkHeap) == 1.0 && due {
                shrunk = Some(tokio::time::Instant::now());
                trim::heap();
            }
        }
    }

    /// How much of each action is to be done, and says so where it begins or ends.
    fn decide(&self) -> impl Fn(Does) -> f64 {
        let mut all = Vec::new();
        for (action, known) in self.settings.actions.iter().zip(&self.scales) {
            let pressure =
                |trigger: &Trigger| f64::from(self.pressures[trigger.monitor].load(Relaxed)) / WHOLE;
            let scales = action.triggers.iter().map(|trigger| trigger.scale(pressure(trigger)));
            let scale = scales.fold(0.0, f64::max);
            let before = known.swap(millionths(scale), Relaxed);
            match (before > 0, scale > 0.0) {
                (false, true) => {
                    tracing::warn!(action = &*action.name, scale, "memory runs short: the action begins");
                }
                (true, false) => {
                    tracing::info!(action = &*action.name, "there is memory again: the action ends");
                }
                _ => {}
            }
            all.push((action.does, scale));
        }
        move |does| all.iter().filter(|(it, _)| *it == does).map(|(_, scale)| *scale).fold(0.0, f64::max)
    }
}

/// A share as a whole number; what is more than all, as memory may be above its limit, counts as all.
fn millionths(share: f64) -> u32 {
    (share.clamp(0.0, 1.0) * WHOLE).round() as u32
}

/// The share of a resource that is in use.
fn measure(resource: LimitedResource) -> Result<f64, String> {
    let number = |path: &str| -> Result<u64, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
        match text.trim() {
            "max" => Ok(u64::MAX),
            number => number.parse().map_err(|error| format!("{path}: {error}")),
        }
    };
    let (used, most) = match resource {
        LimitedResource::Heap(most) => (resident()?, most),
        LimitedResource::Cgroup(limit) => {
            let (used, most) = match number("/sys/fs/cgroup/memory.current") {
                Ok(used) => (used, number("/sys/fs/cgroup/memory.max")?),
                Err(_) => (
                    number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?,
                    number("/sys/fs/cgroup/memory/memory.limit_in_bytes")?,
                ),
            };
            (used, limit.map_or(most, |limit| limit.min(most)))
        }
    };
    Ok(used as f64 / most.max(1) as f64)
}

/// Bytes of this process's memory that are in use and not of files.
fn resident() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| "/proc/self/status has no RssAnon".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pressure(most: Option<u64>, actions: Vec<Action>) -> Arc<Pressure> {
        let monitors = vec![Monitor { name: "m".into(), resource: LimitedResource::Heap(1) }];
        Arc::new(Pressure::of(Settings { max_connections: most, monitors, actions, ..Settings::default() }))
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
    fn the_furthest_trigger_decides() {
        let triggers =
            vec![Trigger { monitor: 0, from: 0.5, to: 0.9 }, Trigger { monitor: 0, from: 0.8, to: 0.8 }];
        let action = Action { name: "a".into(), does: Does::RejectConnections, triggers };
        let pressure = pressure(None, vec![action]);
        let at = |share: f64| {
            pressure.pressures[0].store(millionths(share), Relaxed);
            pressure.decide()(Does::RejectConnections)
        };
        assert_eq!((at(0.5), at(0.8), at(0.95)), (0.0, 1.0, 1.0));
        assert!((at(0.6) - 0.25).abs() < 0.001);
        assert_eq!(pressure.decide()(Does::StopRequests), 0.0);
        assert!(pressure.stats().any(|(name, value)| name == "overload.a.scale_percent" && value == 25));
        assert!(measure(LimitedResource::Heap(1)).unwrap() > 1.0);
    }
}
