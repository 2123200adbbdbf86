//! Changes of a workload: pods that were added or removed, and its readiness.

use std::collections::BTreeSet;

use skysail_sandbox::rundir::PodState;

/// State of a workload at the last report.
#[derive(Debug, Default)]
pub(crate) struct Workload {
    pods: BTreeSet<String>,
    /// It was reported as ready, with the pods it has now.
    ready: bool,
    /// It was ready at some time. Pods that come before that are not reported.
    begun: bool,
}

impl Workload {
    /// Returns a line for each change since the last report. `pods` are the pods that the workload has now.
    pub(crate) fn news(&mut self, workload: &str, pods: &[&PodState]) -> Vec<String> {
        let mut lines = Vec::new();
        let now: BTreeSet<String> = pods.iter().map(|pod| pod.name.clone()).collect();
        if self.begun && now != self.pods {
            for (word, more, less) in [("new ", &now, &self.pods), ("gone", &self.pods, &now)] {
                let names: Vec<_> = more.difference(less).cloned().collect();
                if !names.is_empty() {
                    lines.push(format!("{word}       {workload}: {}", names.join(", ")));
                }
            }
            self.ready = false;
        }
        self.pods = now;
        let problems = pods.iter().filter(|pod| !pod.is_well()).filter_map(|pod| pod.ready.as_ref().err());
        let problems: Vec<&String> = problems.collect();
        match problems.first() {
            None if !self.ready && !pods.is_empty() => {
                (self.ready, self.begun) = (true, true);
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
    fn pods_that_come_and_go_are_told_and_readiness_again() {
        let pod = |name: &str, ready: bool| -> PodState {
            let ready = if ready { json!({ "Ok": null }) } else { json!({ "Err": "starting" }) };
            serde_json::from_value(json!({
                "name": name, "namespace": "shop", "kind": "Deployment", "workload": "db", "account": "default",
                "address": "10.244.0.2", "sidecar": true, "ready": ready, "restarts": 0, "logs": "",
                "programs": [], "handles": null,
            }))
            .unwrap()
        };
        let mut told = Workload::default();
        let mut news = |pods: &[(&str, bool)]| {
            let pods: Vec<_> = pods.iter().map(|(name, ready)| pod(name, *ready)).collect();
            told.news("shop/db", &pods.iter().collect::<Vec<_>>())
        };
        assert!(news(&[("a", false)]).is_empty());
        assert_eq!(news(&[("a", true)]), ["ready      shop/db (1 pod)"]);
        assert!(news(&[("a", true)]).is_empty());
        assert_eq!(news(&[("a", true), ("b", false), ("c", false)]), ["new        shop/db: b, c"]);
        assert_eq!(news(&[("a", true), ("b", true), ("c", true)]), ["ready      shop/db (3 pods)"]);
        assert_eq!(news(&[("a", true)]), ["gone       shop/db: b, c", "ready      shop/db (1 pod)"]);
        assert_eq!(news(&[("a", false)]), ["not ready  shop/db: starting"]);
        assert_eq!(news(&[("a", true)]), ["ready      shop/db (1 pod)"]);
        assert_eq!(news(&[]), ["gone       shop/db: a"]);
    }
}
