//! Changes of a workload: pods added, pods removed, and readiness.

use std::collections::BTreeSet;

use skysail_sandbox::rundir::PodState;

/// Status of a workload at the last report.
#[derive(Debug, Default)]
pub(crate) struct WorkloadStatus {
    /// Names of its pods.
    pods: BTreeSet<String>,
    /// True if it was reported as ready with these pods.
    ready: bool,
    /// True if it was ever ready. Pods added before that are not reported.
    was_ready: bool,
}

impl WorkloadStatus {
    /// Returns a line for each change since the last call. `pods` are the current pods of the workload.
    pub(crate) fn update(&mut self, workload: &str, pods: &[&PodState]) -> Vec<String> {
        let mut lines = Vec::new();
        let now: BTreeSet<String> = pods.iter().map(|pod| pod.name.clone()).collect();
        if self.was_ready && now != self.pods {
            for (word, more, less) in [("new ", &now, &self.pods), ("gone", &self.pods, &now)] {
                let names: Vec<_> = more.difference(less).cloned().collect();
                if !names.is_empty() {
                    lines.push(format!("{word}       {workload}: {}", names.join(", ")));
                }
            }
            self.ready = false;
        }
        self.pods = now;
        let problems = pods.iter().filter(|pod| !pod.is_healthy()).filter_map(|pod| pod.ready.as_ref().err());
        let problems: Vec<&String> = problems.collect();
        match problems.first() {
            None if !self.ready && !pods.is_empty() => {
                (self.ready, self.was_ready) = (true, true);
                let plural = if pods.len() == 1 { "pod" } else { "pods" };
                lines.push(format!("ready      {workload} ({} {plural})", pods.len()));
            }
            Some(problem) if self.ready && problems.len() == pods.len() => {
                self.ready = false;
                lines.push(format!("not ready  {workload}: {problem}"));
            }
            _ => {}
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn added_and_removed_pods_and_readiness_are_reported() {
        let pod = |name: &str, ready: bool| -> PodState {
            let ready = if ready { json!({ "Ok": null }) } else { json!({ "Err": "starting" }) };
            serde_json::from_value(json!({
                "name": name, "namespace": "shop", "kind": "Deployment", "workload": "db", "account": "default",
                "address": "10.244.0.2", "sidecar": true, "ready": ready, "restarts": 0, "logs": "",
                "programs": [], "handles": null,
            }))
            .unwrap()
        };
        let mut status = WorkloadStatus::default();
        let mut update = |pods: &[(&str, bool)]| {
            let pods: Vec<_> = pods.iter().map(|(name, ready)| pod(name, *ready)).collect();
            status.update("shop/db", &pods.iter().collect::<Vec<_>>())
        };
        assert!(update(&[("a", false)]).is_empty());
        assert_eq!(update(&[("a", true)]), ["ready      shop/db (1 pod)"]);
        assert!(update(&[("a", true)]).is_empty());
        assert_eq!(update(&[("a", true), ("b", false), ("c", false)]), ["new        shop/db: b, c"]);
        assert_eq!(update(&[("a", true), ("b", true), ("c", true)]), ["ready      shop/db (3 pods)"]);
        assert_eq!(update(&[("a", true)]), ["gone       shop/db: b, c", "ready      shop/db (1 pod)"]);
        assert_eq!(update(&[("a", false)]), ["not ready  shop/db: starting"]);
        assert_eq!(update(&[("a", true)]), ["ready      shop/db (1 pod)"]);
        assert_eq!(update(&[]), ["gone       shop/db: a"]);
    }
}
