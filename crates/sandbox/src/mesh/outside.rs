//! Reports of failed lookups and connections to the outside. Each is reported once; failed lookups have a remedy.

use std::{collections::BTreeSet, net::IpAddr};

use super::{Mesh, Replica};
use crate::{
    dns::FailedLookup,
    egress::{FailedConnection, LookupResult},
    external,
    networks::BRIDGE,
    plan::Pod,
};

/// Maximum number of reports of one kind. Workloads choose names and destinations, so there may be many.
const MAX_REPORTS: usize = 100;

/// Reports of one kind, each of which is made once.
#[derive(Debug)]
pub(super) struct Reported {
    kind: &'static str,
    subjects: BTreeSet<String>,
}

impl Reported {
    pub(super) fn new(kind: &'static str) -> Self {
        Self { kind, subjects: BTreeSet::new() }
    }

    /// Returns the lines to print: the report if its subject is new, and after the last one that no other follows.
    fn report(&mut self, subject: String, text: String) -> Vec<String> {
        if self.subjects.len() >= MAX_REPORTS || !self.subjects.insert(subject) {
            return Vec::new();
        }
        let is_last = self.subjects.len() == MAX_REPORTS;
        let end = is_last.then(|| format!("further {} are not reported", self.kind));
        [Some(text), end].into_iter().flatten().collect()
    }
}

impl Mesh {
    /// Reports why a name outside the cluster's domain has no answer: for hosts of ServiceEntries each reason once, for
    /// other names once for each workload and name.
    pub(super) fn report_failed_lookup(&mut self, lookup: &FailedLookup) {
        let FailedLookup { name, asked_by, found } = lookup;
        if *asked_by == IpAddr::V4(BRIDGE) {
            return self.report_control_lookup(name, found.as_ref());
        }
        let Some(pod) = self.pod_at(*asked_by) else { return };
        let about = pod.about();
        let why = match found.as_ref().map(reason) {
            Some(reason) => format!("the name {name} has no answer: {reason};"),
            None => {
                match external::missing_answer(&self.objects.entries, name, &pod.namespace, pod.sidecar) {
                    Some(obstacle) => return self.note(format!("{about}: DNS has no answer for {obstacle}")),
                    None => format!(
                        "the name {name} does not exist, and the mesh has no access to the outside; start with --egress, or"
                    ),
                }
            }
        };
        let text =
            format!("{about}: {why} add a pod and a ServiceEntry in its place (docs/external-hosts.md)");
        // The reason may change with each lookup.
        let lines = self.reported_lookups.report(format!("{about}: {name}"), text);
        lines.into_iter().for_each(|line| self.say(line));
    }

    /// Reports once that the control plane cannot look up a host, because its endpoints are outside the mesh.
    fn report_control_lookup(&mut self, host: &str, found: Option<&LookupResult>) {
        let Some((namespace, name)) = external::looked_up(&self.objects.entries, host) else { return };
        let about = format!("ServiceEntry {namespace}/{name}: {host}");
        let (why, remedy) = match found.map(reason) {
            Some(reason) => (reason, ""),
            None => ("the mesh has no access to the outside".to_owned(), "start with --egress, or "),
        };
        let text = format!(
            "{about} has no endpoints, because {why}; {remedy}add pods in its place with resolution STATIC and a \
             workloadSelector (docs/external-hosts.md)"
        );
        // The reason may change with each lookup.
        let lines = self.reported_lookups.report(about, text);
        lines.into_iter().for_each(|line| self.say(line));
    }

    /// Reports each failed connection once for each workload and destination.
    pub(super) fn report_failed_connection(&mut self, failed: FailedConnection) {
        let FailedConnection { from, reason } = failed;
        let about = match from.and_then(|from| self.pod_at(from)) {
            Some(pod) => pod.about(),
            None => "--egress".to_owned(),
        };
        let text = format!("{about}: {reason}");
        let lines = self.reported_connections.report(text.clone(), text);
        lines.into_iter().for_each(|line| self.say(line));
    }

    fn pod_at(&self, address: IpAddr) -> Option<&Pod> {
        let has = |replica: &&Replica| IpAddr::V4(replica.pod.address) == address;
        self.pods.values().find(has).map(|replica| &replica.pod)
    }
}

/// Returns why the host's resolver has no answer for a name.
fn reason(found: &LookupResult) -> String {
    match found {
        LookupResult::Addresses(_) | LookupResult::Missing => "it does not exist".to_owned(),
        LookupResult::Unusable(reason) => reason.clone(),
        LookupResult::Failed(reason) => format!("looking it up on this machine failed: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_subject_is_reported_once_up_to_a_limit() {
        let mut reported = Reported::new("names");
        let mut report = |number: usize| reported.report(number.to_string(), format!("report {number}"));
        assert_eq!(
            (report(1), report(1), report(2)),
            (vec!["report 1".into()], vec![], vec!["report 2".into()])
        );
        let lines: Vec<_> = (0..2 * MAX_REPORTS).flat_map(&mut report).collect();
        assert_eq!(lines.len(), MAX_REPORTS - 1);
        assert_eq!(lines.last().map(String::as_str), Some("further names are not reported"));
    }
}
