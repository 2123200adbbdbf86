//! A namespace of a cluster, which ends with the test.

use std::{
    env, fs,
    io::Write as _,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

/// Number of namespaces that this process has made.
static NAMESPACES: AtomicU32 = AtomicU32::new(0);

/// A namespace of a cluster.
pub(crate) struct Cluster {
    pub(crate) namespace: String,
}

impl Cluster {
    /// Creates a namespace with labels, such as `a=b`. `None`: there is no cluster.
    pub(crate) fn start(labels: &[&str]) -> Option<Self> {
        if !env::var_os("KUBECONFIG").is_some_and(|file| fs::exists(file).unwrap_or(false)) {
            eprintln!("SKIPPED: KUBECONFIG names no cluster");
            return None;
        }
        let number = NAMESPACES.fetch_add(1, Relaxed);
        let cluster = Self { namespace: format!("skysail-test-{}-{number}", std::process::id()) };
        cluster.done(&["create", "namespace", &cluster.namespace], "");
        if !labels.is_empty() {
            cluster.done(&[&["label", "namespace", &cluster.namespace], labels].concat(), "");
        }
        Some(cluster)
    }

    /// Runs kubectl in the namespace with a standard input.
    pub(crate) fn kubectl(&self, arguments: &[&str], input: &str) -> Output {
        let mut child = Command::new("kubectl")
            .args(["--namespace", &self.namespace])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    /// Runs kubectl, which must succeed. Returns its output.
    pub(crate) fn done(&self, arguments: &[&str], input: &str) -> String {
        let output = self.kubectl(arguments, input);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "kubectl {arguments:?}: {error}\n{input}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.kubectl(&["delete", "namespace", &self.namespace, "--wait=false"], "");
    }
}
