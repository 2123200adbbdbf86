//! Workers of a mesh, which are the pods of its mock services, and changes of their behaviour while the mesh runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Stdio,
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ReadyMesh;
use crate::graph::{CONTROL_PORT, WorkerBehavior};

/// Change of the workers of a service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerChange {
    pub(crate) service: String,
    /// Number of workers to change. Absent: all of the service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) replicas: Option<u32>,
    pub(crate) set: WorkerBehavior,
}

/// Workers of a mesh.
#[derive(Debug, Default)]
pub(super) struct Workers {
    /// Pods by service, as NAMESPACE/NAME.
    pods: BTreeMap<String, Vec<String>>,
    /// Pods whose behaviour is not that of their graph.
    changed: BTreeSet<String>,
}

impl Workers {
    /// Reads the workers of a mesh.
    pub(super) async fn of(mesh: &ReadyMesh<'_>) -> anyhow::Result<Self> {
        let output = mesh.program(&["status", "--output", "json"]).output().await?;
        Self::parse(&output.stdout).with_context(|| {
            format!("cannot list the pods: {}", String::from_utf8_lossy(&output.stderr).trim())
        })
    }

    /// Reads the output of `skysail status`.
    fn parse(status: &[u8]) -> anyhow::Result<Self> {
        let status: Value = serde_json::from_slice(status)?;
        let mut pods: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for pod in status["pods"].as_array().context("the status has no pods")? {
            let field = |name: &str| pod[name].as_str().context("a pod has no name");
            let name = format!("{}/{}", field("namespace")?, field("name")?);
            pods.entry(field("workload")?.to_owned()).or_default().push(name);
        }
        pods.values_mut().for_each(|names| names.sort_unstable());
        Ok(Self { pods, changed: BTreeSet::new() })
    }

    /// Changes these workers, and gives back to all others the behaviour of their graph.
    pub(super) async fn apply(
        &mut self,
        mesh: &ReadyMesh<'_>,
        changes: &[WorkerChange],
    ) -> anyhow::Result<()> {
        let wanted = self.wanted(changes)?;
        let url = format!("http://127.0.0.1:{CONTROL_PORT}/");
        let mut running = Vec::with_capacity(wanted.len());
        for (pod, behavior) in &wanted {
            let body = serde_json::to_string(behavior)?;
            let mut command = mesh.program(&["call", "-X", "PUT", "-d", &body, pod, &url]);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            running.push((pod, command.spawn()?));
        }
        // All changes are made at the same time.
        for (pod, process) in running {
            let output = process.wait_with_output().await?;
            if !output.status.success() {
                let text = [output.stdout, output.stderr].concat();
                bail!("cannot change the worker {pod}: {}", String::from_utf8_lossy(&text).trim());
            }
        }
        let is_changed = |(_, behavior): &(String, WorkerBehavior)| *behavior != WorkerBehavior::default();
        self.changed = wanted.into_iter().filter(is_changed).map(|(pod, _)| pod).collect();
        Ok(())
    }

    /// Returns the workers to change with their behaviour.
    fn wanted(&self, changes: &[WorkerChange]) -> anyhow::Result<Vec<(String, WorkerBehavior)>> {
        let mut wanted: BTreeMap<String, WorkerBehavior> =
            self.changed.iter().map(|pod| (pod.clone(), WorkerBehavior::default())).collect();
        for change in changes {
            let pods = self.pods.get(&change.service);
            let pods = pods.with_context(|| format!("no worker runs the service {}", change.service))?;
            let number = change.replicas.map_or(pods.len(), |replicas| replicas as usize);
            wanted.extend(pods.iter().take(number).map(|pod| (pod.clone(), change.set.clone())));
        }
        Ok(wanted.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(text: &str) -> WorkerChange {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_change_ends_with_the_next_one() {
        let status = br#"{"pods": [
            {"namespace": "a", "name": "web-2", "workload": "web"}, {"namespace": "a", "name": "web-1", "workload": "web"},
            {"namespace": "a", "name": "db-1", "workload": "db"}]}"#;
        let mut workers = Workers::parse(status).unwrap();
        assert_eq!(workers.wanted(&[]).unwrap(), []);
        let changes = [
            change(r#"{"service": "web", "replicas": 1, "set": {"down": true}}"#),
            change(r#"{"service": "db", "set": {"delay": "1s"}}"#),
        ];
        let expected =
            [("a/db-1".to_owned(), changes[1].set.clone()), ("a/web-1".to_owned(), changes[0].set.clone())];
        assert_eq!(workers.wanted(&changes).unwrap(), expected);
        workers.changed = expected.map(|(pod, _)| pod).into();
        let all = change(r#"{"service": "web", "set": {"errors": "5%"}}"#);
        let pods: Vec<_> = workers.wanted(std::slice::from_ref(&all)).unwrap();
        let expected =
            [("a/db-1", WorkerBehavior::default()), ("a/web-1", all.set.clone()), ("a/web-2", all.set)];
        assert_eq!(pods, expected.map(|(pod, behavior)| (pod.to_owned(), behavior)));
        let unknown = workers.wanted(&[change(r#"{"service": "x", "set": {}}"#)]).unwrap_err();
        assert_eq!(unknown.to_string(), "no worker runs the service x");
        assert!(Workers::parse(b"{}").is_err());
    }
}
