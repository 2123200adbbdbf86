//! Removal of an installation. The namespace, definitions of kinds and the users' objects stay: without a definition, its
//! objects would be deleted.

use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Pod},
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, ObjectMeta},
};
use serde_json::json;

use crate::{
    connection::{Connection, readable},
    install::{all, line},
    object::{Object, ObjectKind},
    objects::{APP, AUTHORITY, ISTIOD, MANAGER, REVISION, ROOTS},
    preflight::{action, is_foreign, missing_permissions},
    settings::Target,
    wait,
};

/// Label of pods with a sidecar.
const INJECTED: &str = "security.istio.io/tlsMode=istio";

/// An installation in a cluster.
#[derive(Clone, Debug)]
pub struct Installed {
    /// Its objects, in the order of their removal.
    pub objects: Vec<Object>,
    /// What its control plane has made and keeps; removed after it has ended, if at all.
    pub kept: Vec<Object>,
    /// What the user should know before the removal.
    pub notes: Vec<String>,
}

impl Installed {
    /// Finds an installation. `purge` adds its certificate authority and trust bundles.
    ///
    /// # Errors
    /// The API server fails.
    pub async fn find(connection: &Connection, target: &Target, purge: bool) -> anyhow::Result<Self> {
        let mut installed = Self { objects: Vec::new(), kept: Vec::new(), notes: Vec::new() };
        // The webhook configuration is the first: without a control plane, it would prevent new pods.
        let stays = [ObjectKind::NAMESPACE, ObjectKind::DEFINITION];
        for object in all(target).into_iter().rev().filter(|object| !stays.contains(&object.kind)) {
            let found =
                connection.get(&object).await.map_err(readable).with_context(|| object.to_string())?;
            match found {
                Some(found) if is_foreign(&object, &found) => {
                    installed.notes.push(format!("{object} stays: it is not of Skysail"));
                }
                Some(_) => installed.objects.push(object),
                None => {}
            }
        }
        if purge {
            match other_control_plane(connection, target).await? {
                None => installed.kept = kept(connection, target).await?,
                Some(other) => installed.notes.push(format!(
                    "the certificate authority and the root certificates stay: Deployment {}/{other} uses them",
                    target.namespace
                )),
            }
        }
        if let Some(count) = injected_pods(connection, target).await.filter(|count| *count > 0) {
            installed.notes.push(format!(
                "pods with a sidecar of this revision: {count}; they get no changes and no certificates any more until \
                 they are replaced"
            ));
        }
        Ok(installed)
    }
}

/// Returns the name of another control plane in the namespace, which has the same certificate authority.
async fn other_control_plane(connection: &Connection, target: &Target) -> anyhow::Result<Option<String>> {
    let api: Api<Deployment> = Api::namespaced(connection.client(), &target.namespace);
    let labelled = ListParams::default().labels(&format!("{APP}={ISTIOD}"));
    let found = api.list_metadata(&labelled).await.map_err(readable)?;
    Ok(found.items.iter().map(|one| one.name_any()).find(|name| *name != target.name()))
}

/// Returns whether there is a control plane in another namespace, which may use the same ConfigMaps.
async fn is_elsewhere(connection: &Connection, target: &Target) -> anyhow::Result<bool> {
    let api: Api<Deployment> = Api::all(connection.client());
    let labelled = ListParams::default().labels(&format!("{APP}={ISTIOD}"));
    let found = api.list_metadata(&labelled).await.map_err(readable)?;
    Ok(found.items.iter().any(|one| one.namespace().as_deref() != Some(&target.namespace)))
}

/// Returns the objects that the control plane has made, and that a later installation would use again. ConfigMaps in all
/// namespaces may also be those of a control plane in another namespace, and are then no part of them.
async fn kept(connection: &Connection, target: &Target) -> anyhow::Result<Vec<Object>> {
    let mut kept = Vec::new();
    let secret = Object::new(ObjectKind::SECRET, &target.namespace, AUTHORITY, json!({}));
    if connection.get(&secret).await.map_err(readable)?.is_some() {
        kept.push(secret);
    }
    if is_elsewhere(connection, target).await? {
        return Ok(kept);
    }
    let api: Api<ConfigMap> = Api::all(connection.client());
    let named = ListParams::default().fields(&format!("metadata.name={ROOTS}"));
    let maps = api.list_metadata(&named).await.map_err(readable)?;
    for map in maps.items.iter().filter(|map| is_written_by_skysail(&map.metadata)) {
        kept.push(Object::new(
            ObjectKind::CONFIG_MAP,
            &map.namespace().unwrap_or_default(),
            ROOTS,
            json!({}),
        ));
    }
    Ok(kept)
}

fn is_written_by_skysail(metadata: &ObjectMeta) -> bool {
    let mut owners = metadata.managed_fields.iter().flatten();
    owners.any(|owner| owner.manager.as_deref() == Some(MANAGER))
}

/// Returns the number of pods with a sidecar of the revision, if it can be known.
async fn injected_pods(connection: &Connection, target: &Target) -> Option<usize> {
    let api: Api<Pod> = Api::all(connection.client());
    let pods = api.list_metadata(&ListParams::default().labels(INJECTED)).await.ok()?;
    let is_of_revision = |metadata: &ObjectMeta| {
        let annotations = metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(REVISION)).is_some_and(|revision| *revision == target.revision)
    };
    Some(pods.items.iter().filter(|pod| is_of_revision(&pod.metadata)).count())
}

/// Removes an installation and waits until it is gone. Reports each step as a line.
///
/// # Errors
/// A permission is missing, and nothing is removed; or the API server fails; or an object does not end in time.
pub async fn uninstall(
    connection: &Connection,
    installed: &Installed,
    timeout: Duration,
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let all = installed.objects.iter().chain(&installed.kept);
    let actions: Vec<_> = all.map(|object| action("delete", object)).collect();
    let missing = missing_permissions(connection, &actions).await?;
    if !missing.is_empty() {
        bail!("nothing was removed: you lack the permission to\n  {}", missing.join("\n  "));
    }
    // A running control plane would make again what it keeps.
    for objects in [&installed.objects, &installed.kept] {
        for object in objects {
            let removed = connection.delete(object).await.map_err(readable);
            let is_removed = removed.with_context(|| object.to_string())?;
            report(&line(if is_removed { "removed" } else { "absent" }, &object.to_string()));
        }
        for object in objects {
            wait::end(connection, object, timeout, report).await?;
        }
    }
    Ok(())
}
