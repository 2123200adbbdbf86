//! Checks of a cluster, before and after an installation. They change nothing.

mod api;
mod certificates;
mod control_plane;
mod data_plane;
mod webhooks;

use std::{fmt, future::Future};

use k8s_openapi::{api::discovery::v1::EndpointSlice, serde::de::DeserializeOwned};
use kube::{Api, api::ListParams};
use skysail_inject::Settings;

use crate::{
    connection::{Connection, Denied, readable},
    install::all,
    preflight,
    settings::Target,
};

/// Number of objects in a page of a list.
const PAGE: u32 = 500;
/// Maximum number of objects that a detail names.
const MAX_NAMED: usize = 5;

/// Part of the system that a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// The API server and the nodes.
    Cluster,
    /// What an installation needs.
    Installation,
    /// Definitions of kinds (CRDs).
    Kinds,
    /// The control plane.
    ControlPlane,
    /// Webhooks for injection and validation.
    Webhooks,
    /// Root certificates.
    Certificates,
    /// The sidecars and gateways.
    DataPlane,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckResult {
    /// Part that it is about.
    pub category: Category,
    /// What should hold.
    pub subject: &'static str,
    /// Whether it holds.
    pub verdict: Verdict,
    /// Value or problem that the check found; empty if there is none to report.
    pub detail: String,
    /// What to do about it; empty if nothing is to be done.
    pub remedy: String,
}

/// Whether a subject holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    Passed,
    /// The mesh works, but something may be unintended or fail later.
    Warned,
    /// It does not hold.
    Failed,
    /// It could not be checked.
    Skipped,
}

/// What a check found.
struct Found {
    verdict: Verdict,
    detail: String,
    remedy: String,
}

impl Category {
    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cluster => "cluster",
            Self::Installation => "installation",
            Self::Kinds => "kinds",
            Self::ControlPlane => "control-plane",
            Self::Webhooks => "webhooks",
            Self::Certificates => "certificates",
            Self::DataPlane => "data-plane",
        }
    }
}

impl Verdict {
    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Warned => "warning",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Found {
    fn passed(detail: impl Into<String>) -> Self {
        Self { verdict: Verdict::Passed, detail: detail.into(), remedy: String::new() }
    }

    fn warned(detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { verdict: Verdict::Warned, detail: detail.into(), remedy: remedy.into() }
    }

    fn failed(detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { verdict: Verdict::Failed, detail: detail.into(), remedy: remedy.into() }
    }

    /// Returns the result of a check that a request has ended.
    fn of_error(error: &anyhow::Error) -> Self {
        let detail = format!("{error:#}");
        match error.chain().any(|cause| cause.is::<Denied>()) {
            true => Self::skipped(detail),
            false => {
                Self::failed(detail, "repeat the check; see the log of the API server if it fails again")
            }
        }
    }

    fn skipped(detail: impl Into<String>) -> Self {
        Self { verdict: Verdict::Skipped, detail: detail.into(), remedy: String::new() }
    }
}

/// Makes checks one after the other, and reports their results.
struct Checks<'a> {
    report: &'a dyn Fn(&CheckResult),
    /// No check has failed.
    is_good: bool,
}

impl Checks<'_> {
    /// Makes a check. It is skipped if a permission is missing, and fails with any other error. Returns whether it passed,
    /// or passed with a warning.
    async fn make(
        &mut self,
        category: Category,
        subject: &'static str,
        check: impl Future<Output = anyhow::Result<Found>>,
    ) -> bool {
        let found = check.await.unwrap_or_else(|error| Found::of_error(&error));
        self.add(category, subject, found)
    }

    fn add(&mut self, category: Category, subject: &'static str, found: Found) -> bool {
        let Found { verdict, detail, remedy } = found;
        self.is_good &= verdict != Verdict::Failed;
        (self.report)(&CheckResult { category, subject, verdict, detail, remedy });
        matches!(verdict, Verdict::Passed | Verdict::Warned)
    }
}

/// Checks whether a control plane can be installed. Reports each result, and returns whether no check failed.
pub async fn check_before(connection: &Connection, target: &Target, report: &dyn Fn(&CheckResult)) -> bool {
    let mut checks = Checks { report, is_good: true };
    if !cluster(connection, &mut checks).await {
        return false;
    }
    let subject = "the objects can be created";
    match preflight::check(connection, target, &all(target), false).await {
        Ok(findings) => {
            let is_possible = findings.problems.is_empty();
            let remedy = "these checks use images that do not exist; `skysail install --dry-run` uses yours";
            for problem in findings.problems {
                checks.add(Category::Installation, subject, Found::failed(problem, remedy));
            }
            if is_possible {
                let count = findings.changes.len();
                checks.add(Category::Installation, subject, Found::passed(format!("{count} objects")));
                kinds(findings.notes, &mut checks);
            }
        }
        Err(error) => {
            checks.add(Category::Installation, subject, Found::failed(format!("{error:#}"), ""));
        }
    }
    checks.is_good
}

/// Checks an installed control plane and its sidecars. Reports each result, and returns whether no check failed.
pub async fn check_installed(
    connection: &Connection,
    target: &Target,
    report: &dyn Fn(&CheckResult),
) -> bool {
    let mut checks = Checks { report, is_good: true };
    if !cluster(connection, &mut checks).await {
        return false;
    }
    let installed = control_plane::is_installed(connection, target);
    if !checks.make(Category::ControlPlane, "it is installed", installed).await {
        return false;
    }
    control_plane::check(connection, target, &mut checks).await;
    match preflight::missing_kinds(connection).await {
        Ok(notes) => kinds(notes, &mut checks),
        Err(error) => _ = checks.add(Category::Kinds, KINDS, Found::of_error(&error)),
    }
    webhooks::check(connection, target, &mut checks).await;
    certificates::check(connection, target, &mut checks).await;
    data_plane::check(connection, target, &mut checks).await;
    checks.is_good
}

/// Checks the cluster itself. Returns whether it can be used.
async fn cluster(connection: &Connection, checks: &mut Checks<'_>) -> bool {
    let version = match preflight::version(connection).await {
        Ok(version) => Found::passed(format!("Kubernetes {version} at {}", connection.address())),
        Err(error) => Found::failed(format!("{error:#}"), "check --kubeconfig and --context"),
    };
    if !checks.add(Category::Cluster, "the API server answers, and is recent enough", version) {
        return false;
    }
    checks.make(Category::Cluster, "the clocks of machines agree", api::clocks(connection)).await;
    checks
        .make(Category::Cluster, "the DNS service of the cluster has endpoints", api::dns(connection))
        .await;
    true
}

const KINDS: &str = "the kinds of Istio and of the Gateway API are defined";

fn kinds(missing: Vec<String>, checks: &mut Checks<'_>) {
    if missing.is_empty() {
        checks.add(Category::Kinds, KINDS, Found::passed(""));
    }
    for note in missing {
        checks.add(Category::Kinds, KINDS, Found::warned(note, ""));
    }
}

/// Returns the settings by which this revision decides about the injection of a pod.
fn injection_settings(target: &Target, image: &str) -> Settings {
    Settings {
        revision: target.revision.clone(),
        is_default_revision: target.is_default(),
        ..Settings::new(image)
    }
}

/// Returns all objects of a list, page by page.
async fn list<T>(api: &Api<T>, mut parameters: ListParams) -> anyhow::Result<Vec<T>>
where
    T: Clone + DeserializeOwned + fmt::Debug,
{
    parameters = parameters.limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = api.list(&parameters).await.map_err(readable)?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => return Ok(all),
        }
    }
}

/// Returns the number of endpoints of a Service that are ready.
async fn ready_endpoints(connection: &Connection, namespace: &str, service: &str) -> anyhow::Result<usize> {
    let api: Api<EndpointSlice> = Api::namespaced(connection.client(), namespace);
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={service}"));
    let slices = list(&api, of_service).await?;
    let endpoints = slices.into_iter().flat_map(|slice| slice.endpoints);
    Ok(endpoints.filter(|of| of.conditions.as_ref().is_none_or(|of| of.ready != Some(false))).count())
}

/// Returns the first names of a list, and how many follow.
fn named(names: &[String]) -> String {
    let first = names.iter().take(MAX_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MAX_NAMED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}
