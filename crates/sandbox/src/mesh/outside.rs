//! Reports of failed lookups and connections to the outside. Each is reported once; failed lookups have a remedy.

use std::net::IpAddr;

use super::{Mesh, Replica};
use crate::{
    dns::FailedLookup,
    egress::{FailedConnection, LookupResult},
    external,
    networks::BRIDGE,
    plan::Pod,
};

/// Maximum number of failed connections that are reported. Workloads choose their destinations, so there may be many.
const CONNECTIONS: usize = 100;

impl Mesh {
    /// Reports why a name outside the cluster's domain has no answer: for hosts of ServiceEntries each reason once, for
    /// other names once for each workload.
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
        if self.reported_lookups.insert(about.clone()) {
            self.say(format!(
                "{about}: {why} add a pod and a ServiceEntry in its place (docs/external-hosts.md)"
            ));
        }
    }

    /// Reports once that the control plane cannot look up a host, because its endpoints are outside the mesh.
    fn report_control_lookup(&mut self, host: &str, found: Option<&LookupResult>) {
        let Some((namespace, name)) = external::looked_up(&self.objects.entries, host) else { return };
        let about = format!("ServiceEntry {namespace}/{name}: {host}");
        let (why, remedy) = match found.map(reason) {
            Some(reason) => (reason, ""),
            None => ("the mesh has no access to the outside".to_owned(), "start with --egress, or "),
        };
        // The reason may change with each lookup.
        if self.reported_lookups.insert(about.clone()) {
            self.say(format!(
                "{about} has no endpoints, because {why}; {remedy}add pods in its place with resolution STATIC and a \
                 workloadSelector (docs/external-hosts.md)"
            ));
        }
    }

    /// Reports each failed connection once for each workload and destination.
    pub(super) fn report_failed_connection(&mut self, failed: FailedConnection) {
        let FailedConnection { from, reason } = failed;
        let about = match from.and_then(|from| self.pod_at(from)) {
            Some(pod) => pod.about(),
            None => "--egress".to_owned(),
        };
        let text = format!("{about}: {reason}");
        if self.reported_connections.len() >= CONNECTIONS || !self.reported_connections.insert(text.clone()) {
            return;
        }
        self.say(text);
        if self.reported_connections.len() == CONNECTIONS {
            self.say("further failed connections to addresses outside the mesh are not reported".to_owned());
        }
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
