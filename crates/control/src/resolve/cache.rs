//! The DNS cache: the names of the mesh's endpoints, their addresses, and the state of their lookups.
//!
//! While a lookup fails, the last addresses of its name stay in effect without a time limit, as in Envoy. An outdated
//! address is better than none. An answer without addresses removes them. The state file keeps the last addresses over
//! restarts.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::IpAddr,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::Serialize;
use skysail_model::Resolved;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    query::{Answer, Family, LookupError},
    schedule::QuerySchedule,
};
use crate::{metrics::Condition, state_file::StateFile};

/// Name of the file in the state directory.
const FILE: &str = "addresses.json";

/// All names and the state of their lookups.
#[derive(Debug, Default)]
pub(crate) struct DnsCache {
    entries: Mutex<Entries>,
    /// Addresses from the state file, for names that were not looked up yet.
    restored: Mutex<RestoredAddresses>,
    file: StateFile,
}

pub(super) type Entries = BTreeMap<Arc<str>, CacheEntry>;

/// Addresses by name; of each family the current one first.
type RestoredAddresses = HashMap<String, Vec<IpAddr>>;

/// State of a name.
#[derive(Debug, Default)]
pub(super) struct CacheEntry {
    /// Services (`NAMESPACE/HOST`) whose endpoints have the name.
    pub(super) used_by: Vec<String>,
    pub(super) families: BTreeMap<Family, RecordSet>,
    /// Condition that was logged last.
    logged: Condition,
}

/// Addresses of a name in one family.
#[derive(Debug)]
pub(super) struct RecordSet {
    /// In the order of the last answer.
    addresses: Vec<IpAddr>,
    /// Address for services that use one address only (`DNS_ROUND_ROBIN`).
    pub(super) current: Option<IpAddr>,
    pub(super) schedule: QuerySchedule,
    /// The name does not exist (`NXDOMAIN`).
    nxdomain: bool,
    /// Error of the last lookup.
    error: Option<LookupError>,
    /// No lookup has ended yet.
    is_new: bool,
}

/// State of a name, for the admin page.
#[derive(Debug, Serialize)]
pub(crate) struct NameStatus {
    name: String,
    condition: Condition,
    /// Services (`NAMESPACE/HOST`) whose endpoints have the name.
    used_by: Vec<String>,
    /// By record type.
    records: BTreeMap<String, RecordStatus>,
}

/// State of one family of addresses, for the admin page.
#[derive(Debug, Serialize)]
struct RecordStatus {
    addresses: Vec<IpAddr>,
    /// Seconds until the last answer expires; negative after its expiry.
    seconds_left: Option<f64>,
    /// Seconds until the next query; 0 while a query is in progress.
    next_in_seconds: f64,
    /// Number of queries without an answer since the last answer.
    failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl DnsCache {
    /// Returns an empty cache. Reads the last addresses from the state directory.
    pub(crate) fn open(directory: Option<&Path>) -> Self {
        let file = StateFile::new(directory, FILE);
        Self { restored: Mutex::new(file.read()), file, ..Self::default() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first state of a name, with its restored addresses.
    pub(super) fn new_entry(&self, name: &str, now: Instant) -> CacheEntry {
        let restored = self.restored.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        let record_set = |family: Family| {
            let addresses = restored.iter().flatten().filter(|address| family.contains(address));
            (family, RecordSet::new(addresses.copied().collect(), now))
        };
        CacheEntry { families: Family::BOTH.map(record_set).into(), ..CacheEntry::default() }
    }

    /// Marks the addresses as changed, so that they are written to the state file.
    pub(super) fn mark_changed(&self) {
        self.file.mark_changed();
    }

    /// Writes changed addresses to the state file. Never returns.
    pub(crate) async fn write_changes(self: Arc<Self>) {
        let cache = Arc::clone(&self);
        self.file.write_changes(move || cache.write()).await;
    }

    /// Writes the addresses if they have changed. Blocks.
    ///
    /// # Errors
    /// When the state directory cannot be written to.
    pub(crate) fn write(&self) -> io::Result<()> {
        self.file.write(|| {
            let entries = self.lock();
            let all = entries.iter().map(|(name, entry)| (name.to_string(), entry.addresses()));
            all.filter(|(_, addresses)| !addresses.is_empty()).collect::<BTreeMap<_, _>>()
        })
    }

    /// Returns the state of every name.
    pub(crate) fn status(&self) -> Vec<NameStatus> {
        let now = Instant::now();
        let status = |(name, entry): (&Arc<str>, &CacheEntry)| NameStatus {
            name: name.to_string(),
            condition: entry.condition(),
            used_by: entry.used_by.clone(),
            records: entry
                .families
                .iter()
                .map(|(family, records)| (family.to_string(), records.status(now)))
                .collect(),
        };
        self.lock().iter().map(status).collect()
    }

    /// Returns the number of names in each condition.
    pub(crate) fn conditions(&self) -> BTreeMap<Condition, usize> {
        let mut counts = BTreeMap::new();
        self.lock().values().for_each(|entry| *counts.entry(entry.condition()).or_default() += 1);
        counts
    }
}

impl CacheEntry {
    pub(super) fn condition(&self) -> Condition {
        let mut records = self.families.values();
        let has_addresses = self.families.values().any(|records| !records.addresses.is_empty());
        if self.families.values().all(|records| records.is_new) {
            Condition::New
        } else if records.any(|records| records.error.is_some()) {
            if has_addresses { Condition::Stale } else { Condition::Failed }
        } else if has_addresses {
            Condition::Resolved
        } else {
            Condition::Missing
        }
    }

    /// Returns whether a lookup of each family has ended.
    pub(super) fn is_complete(&self) -> bool {
        self.families.values().all(|records| !records.is_new)
    }

    /// Returns all addresses, of each family the current one first.
    fn addresses(&self) -> Vec<IpAddr> {
        let of_family = |records: &RecordSet| {
            let others =
                records.addresses.iter().copied().filter(|address| Some(*address) != records.current);
            records.current.into_iter().chain(others).collect::<Vec<_>>()
        };
        self.families.values().flat_map(of_family).collect()
    }

    pub(super) fn resolved(&self) -> Resolved {
        let addresses = self.families.values().flat_map(|records| records.addresses.iter().copied());
        let current = self.families.values().filter_map(|records| records.current);
        Resolved { addresses: addresses.collect(), current: current.collect() }
    }

    /// Logs the condition of a name when it changes.
    pub(super) fn log_condition(&mut self, name: &str) {
        let condition = self.condition();
        let before = std::mem::replace(&mut self.logged, condition);
        if condition == before {
            return;
        }
        let error = self.families.values().find_map(|records| records.error.as_deref()).unwrap_or_default();
        let used_by = self.used_by.join(", ");
        match condition {
            Condition::Stale => {
                warn!(name, error, used_by, "DNS lookup failed; the last addresses stay in effect");
            }
            Condition::Failed => {
                warn!(name, error, used_by, "DNS lookup failed; the endpoints of this name are missing");
            }
            Condition::Missing => {
                warn!(
                    name,
                    used_by, "DNS has no addresses for this name; its endpoints are missing; check the name"
                );
            }
            Condition::Resolved if before != Condition::New => {
                info!(name, "DNS lookup succeeded again");
            }
            Condition::Resolved | Condition::New => {}
        }
    }
}

impl RecordSet {
    /// Returns the state before the first lookup, with restored addresses.
    pub(super) fn new(addresses: Vec<IpAddr>, now: Instant) -> Self {
        let (current, schedule) = (addresses.first().copied(), QuerySchedule::new(now));
        Self { addresses, current, schedule, nxdomain: false, error: None, is_new: true }
    }

    /// Applies the result of a lookup.
    pub(super) fn apply(&mut self, answer: Result<Answer, LookupError>, rate: Duration, now: Instant) {
        self.is_new = false;
        match answer {
            Ok(Answer::Addresses(addresses, ttl)) => {
                // The current address stays, so that it does not change with the order of the answers.
                let kept = self.current.filter(|current| addresses.contains(current));
                self.current = kept.or(addresses.first().copied());
                self.addresses = addresses;
                (self.nxdomain, self.error) = (false, None);
                self.schedule.after_addresses(ttl, rate, now);
            }
            Ok(Answer::NoAddresses { nxdomain, ttl }) => {
                (self.addresses, self.current) = (Vec::new(), None);
                (self.nxdomain, self.error) = (nxdomain, None);
                self.schedule.after_no_addresses(ttl, now);
            }
            Err(error) => {
                self.error = Some(error);
                self.schedule.after_failure(now);
            }
        }
    }

    fn status(&self, now: Instant) -> RecordStatus {
        let nxdomain = || self.nxdomain.then(|| "the name does not exist (NXDOMAIN)".to_owned());
        RecordStatus {
            addresses: self.addresses.clone(),
            seconds_left: self.schedule.seconds_left(now),
            next_in_seconds: self.schedule.next_query.saturating_duration_since(now).as_secs_f64(),
            failures: self.schedule.failures,
            error: self.error.as_ref().map(ToString::to_string).or_else(nxdomain),
        }
    }
}
