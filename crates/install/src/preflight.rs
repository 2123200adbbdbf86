//! Checks before an installation. Nothing is changed before all of them have passed.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::{
    admissionregistration::v1::MutatingWebhookConfiguration,
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, ListParams, PostParams},
};
use serde_json::Value;
use skysail_model::api::Kind;

use crate::{
    changes::Change,
    connection::{ApplyMode, Connection, is_missing, readable},
    object::{Object, ObjectKind},
    objects::{APP, INJECTOR, MANAGED_BY, MANAGER, REVISION},
    settings::Target,
};

/// Number of concurrent requests.
const REQUESTS: usize = 8;
/// Oldest minor version of Kubernetes 1: it has sidecars as init containers, and `sleep` before the end of a container.
const MIN_MINOR: u32 = 30;
/// Label of a tag of Istio's revisions.
const TAG: &str = "istio.io/tag";
/// Value of the label [`APP`] of Istio's webhook configurations.
const ISTIO_INJECTOR: &str = "sidecar-injector";
/// Ends of the API groups whose kinds users install, with the project's name. Skysail's own kinds are optional.
const DEFINITIONS: [(&str, &str); 2] =
    [(".istio.io", "Istio"), ("gateway.networking.k8s.io", "the Gateway API")];

/// Result of the checks.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// What prevents the installation.
    pub(crate) problems: Vec<String>,
    /// What the user should know.
    pub(crate) notes: Vec<String>,
    /// What the installation would change.
    pub(crate) changes: Vec<(String, Change)>,
}

/// Returns the version of Kubernetes.
///
/// # Errors
/// The API server cannot be reached, or is too old.
pub(crate) async fn version(connection: &Connection) -> anyhow::Result<String> {
    let found = connection.client().apiserver_version().await.map_err(readable);
    let address = connection.address();
    let version = found.with_context(|| format!("the API server at {address} cannot be reached"))?;
    // Some clouds write a minor version such as 30+.
    let number =
        |text: &str| text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse::<u32>().unwrap_or(0);
    if (number(&version.major), number(&version.minor)) < (1, MIN_MINOR) {
        bail!("the cluster has Kubernetes {}, and Skysail needs 1.{MIN_MINOR} or later", version.git_version);
    }
    Ok(version.git_version)
}

/// Checks all that must hold for the objects.
///
/// # Errors
/// The API server fails.
pub(crate) async fn check(
    connection: &Connection,
    target: &Target,
    objects: &[Object],
    force: bool,
) -> anyhow::Result<Findings> {
    let mut findings = Findings::default();
    for missing in missing_permissions(connection, &needed(objects)).await? {
        findings.problems.push(format!("you lack the permission to {missing}"));
    }
    // Without permissions, the other checks would repeat what is missing.
    if !findings.problems.is_empty() {
        findings.problems.push("a member of the cluster role cluster-admin has all of them".to_owned());
        return Ok(findings);
    }
    findings.notes = missing_kinds(connection).await?;
    if !force {
        findings.problems.extend(other_injectors(connection, target).await?);
    }
    let is_there = connection.get(&objects[0]).await.map_err(readable)?.is_some();
    for object in objects {
        let before = connection.get(object).await.map_err(readable)?;
        if !force && before.as_ref().is_some_and(|before| is_foreign(object, before)) {
            findings.problems.push(format!(
                "{object} exists and is not of Skysail, such as that of istiod; choose another --revision or --namespace, \
                 or take it over with --force"
            ));
            continue;
        }
        match connection.apply(object, ApplyMode { dry_run: true, force }).await {
            Ok(after) => findings.changes.push((object.to_string(), Change::between(before, after))),
            // The namespace or a role is not there yet.
            Err(error) if is_missing(&error) && (!is_there || before.is_none()) => {
                findings.changes.push((object.to_string(), Change::Created));
            }
            Err(error) => findings.problems.push(refused(object, error)),
        }
    }
    Ok(findings)
}

/// Returns the message about an object that the API server refuses.
pub(crate) fn refused(object: &Object, error: kube::Error) -> String {
    let is_conflict = matches!(&error, kube::Error::Api(status) if status.code == 409);
    let remedy = if is_conflict { "; take the fields over with --force" } else { "" };
    format!("{object} is refused: {}{remedy}", readable(error))
}

/// Returns whether an object in the cluster is of another program. Any namespace may contain a control plane, and a
/// definition of Skysail's kind may have been made by hand.
pub(crate) fn is_foreign(object: &Object, found: &Value) -> bool {
    let is_shared = [ObjectKind::NAMESPACE, ObjectKind::DEFINITION].contains(&object.kind);
    !is_shared && found["metadata"]["labels"][MANAGED_BY] != MANAGER
}

/// An action that needs a permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Action {
    pub(crate) verb: &'static str,
    pub(crate) resource: ApiResource,
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
}

/// Returns the actions of an installation. An application creates what does not exist.
fn needed(objects: &[Object]) -> Vec<Action> {
    let of_object = |object: &Object| ["get", "create", "patch"].map(|verb| action(verb, object));
    let list = Action { verb: "list", resource: ObjectKind::WEBHOOK.resource(), namespace: None, name: None };
    objects.iter().flat_map(of_object).chain([list]).collect()
}

/// Returns an action on an object.
pub(crate) fn action(verb: &'static str, object: &Object) -> Action {
    let (namespace, name) = (object.namespace.clone(), Some(object.name.clone()));
    Action { verb, resource: object.kind.resource(), namespace, name }
}

/// Returns the actions that are not permitted.
pub(crate) async fn missing_permissions(
    connection: &Connection,
    actions: &[Action],
) -> anyhow::Result<Vec<String>> {
    let api: Api<SelfSubjectAccessReview> = Api::all(connection.client());
    let check = async |action: &Action| {
        let Action { verb, resource, namespace, name } = action;
        let attributes = ResourceAttributes {
            verb: Some((*verb).to_owned()),
            group: Some(resource.group.clone()),
            resource: Some(resource.plural.clone()),
            namespace: namespace.clone(),
            name: name.clone(),
            ..Default::default()
        };
        let spec =
            SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
        let review = SelfSubjectAccessReview { spec, ..Default::default() };
        let answer = api.create(&PostParams::default(), &review).await.map_err(readable);
        let answer = answer.context("the API server does not say what you may do")?;
        let is_allowed = answer.status.is_some_and(|status| status.allowed);
        let place = namespace.as_ref().map(|namespace| format!(" in {namespace}")).unwrap_or_default();
        let group = if resource.group.is_empty() { String::new() } else { format!(".{}", resource.group) };
        let text = format!("{verb} {}{group}{place}", resource.plural);
        anyhow::Ok((!is_allowed).then_some(text))
    };
    let answers: Vec<Option<String>> =
        stream::iter(actions).map(check).buffered(REQUESTS).try_collect().await?;
    let mut missing: Vec<String> = answers.into_iter().flatten().collect();
    missing.dedup();
    Ok(missing)
}

/// Returns notes about kinds that the cluster does not have.
pub(crate) async fn missing_kinds(connection: &Connection) -> anyhow::Result<Vec<String>> {
    let client = connection.client();
    let mut notes = Vec::new();
    let groups = client.list_api_groups().await.map_err(readable)?;
    for (suffix, name) in DEFINITIONS {
        let kinds = || Kind::ALL.iter().filter(|kind| kind.group().ends_with(suffix));
        let mut missing: BTreeSet<(&str, &str)> = kinds().map(|kind| (kind.group(), kind.as_str())).collect();
        let wanted: BTreeSet<&str> = missing.iter().map(|(group, _)| *group).collect();
        for group in groups.groups.iter().filter(|group| wanted.contains(group.name.as_str())) {
            for version in &group.versions {
                let served = match client.list_api_group_resources(&version.group_version).await {
                    // The definition was made a moment ago, and is not served yet.
                    Err(kube::Error::Api(error)) if error.code == 404 => continue,
                    served => served.map_err(readable)?,
                };
                for resource in served.resources {
                    missing
                        .retain(|(of, kind)| (*of, *kind) != (group.name.as_str(), resource.kind.as_str()));
                }
            }
        }
        let count = kinds().count();
        if !missing.is_empty() {
            let names: Vec<&str> = missing.iter().map(|(_, kind)| *kind).collect();
            let which =
                if names.len() == count { String::new() } else { format!(" for {}", names.join(", ")) };
            notes.push(format!(
                "the cluster has no definitions (CRDs) of {name}{which}; install them to create such objects, before or \
                 after Skysail"
            ));
        }
    }
    Ok(notes)
}

/// Returns a problem for each other control plane that injects the pods of this revision.
pub(crate) async fn other_injectors(connection: &Connection, target: &Target) -> anyhow::Result<Vec<String>> {
    let mut problems = Vec::new();
    let api: Api<MutatingWebhookConfiguration> = Api::all(connection.client());
    let found = api.list(&ListParams::default()).await.map_err(readable)?;
    for configuration in found {
        let (name, labels) = (configuration.name_any(), configuration.labels());
        let label = |key: &str| labels.get(key).map(String::as_str).unwrap_or_default();
        let injects = [INJECTOR, ISTIO_INJECTOR].contains(&label(APP));
        let is_of_revision = label(REVISION) == target.revision || label(TAG) == target.revision;
        if injects && is_of_revision && name != target.webhook() {
            problems.push(format!(
                "the pods of revision {} are injected by another control plane (MutatingWebhookConfiguration {name}); \
                 choose another --revision, or install both with --force",
                target.revision
            ));
        }
    }
    Ok(problems)
}
