//! Checks of the control plane's objects and pods.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::{apps::v1::Deployment, coordination::v1::Lease, core::v1::Pod};
use kube::{Api, ResourceExt as _, api::ListParams};

use super::{Category, Checks, Found, list, named, ready_endpoints};
use crate::{
    connection::{Connection, readable},
    install::all,
    object::ObjectKind,
    objects::{LEASE, MANAGED_BY, MANAGER, REVISION},
    preflight::is_foreign,
    settings::Target,
    wait,
};

const CATEGORY: Category = Category::ControlPlane;
/// Kinds that depend on the options of the installation.
const OPTIONAL: [ObjectKind; 2] = [ObjectKind::AUTOSCALER, ObjectKind::VALIDATION];
/// Age of a restart that is no longer of interest.
const RECENT: Duration = Duration::from_hours(1);
/// Age of a Lease at which no replica leads: several times its duration, and more than clocks may differ.
const STALE_LEASE: Duration = Duration::from_secs(120);

/// Checks that there is a control plane of Skysail.
pub(super) async fn is_installed(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let Target { namespace, revision } = target;
    for object in all(target).iter().filter(|object| object.kind == ObjectKind::DEPLOYMENT) {
        let found = connection.get(object).await.map_err(readable)?;
        if found.is_some_and(|found| !is_foreign(object, &found)) {
            return Ok(Found::passed(format!("revision {revision} in namespace {namespace}")));
        }
    }
    Ok(Found::failed(
        format!("there is no control plane of revision {revision} in namespace {namespace}"),
        "install it with `skysail install`, or name another --namespace or --revision",
    ))
}

/// Checks that the installation is complete.
async fn objects(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let (mut missing, mut count) = (Vec::new(), 0);
    for object in all(target) {
        match connection.get(&object).await.map_err(readable)? {
            Some(_) => count += 1,
            None if OPTIONAL.contains(&object.kind) => {}
            None => missing.push(object.to_string()),
        }
    }
    if missing.is_empty() {
        return Ok(Found::passed(format!("{count}")));
    }
    let remedy = "repeat `skysail install` with the same options";
    Ok(Found::failed(format!("missing: {}", named(&missing)), remedy))
}

/// Makes the further checks of the control plane.
pub(super) async fn check(connection: &Connection, target: &Target, checks: &mut Checks<'_>) {
    checks.make(CATEGORY, "its objects exist", objects(connection, target)).await;
    checks.make(CATEGORY, "its pods are available", pods(connection, target)).await;
    checks.make(CATEGORY, "its pods do not restart", restarts(connection, target)).await;
    checks.make(CATEGORY, "its Service has endpoints", endpoints(connection, target)).await;
    checks.make(CATEGORY, "one of its replicas leads", leader(connection, target)).await;
}

async fn pods(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let api: Api<Deployment> = Api::namespaced(connection.client(), &target.namespace);
    let deployment = api.get(&target.name()).await.map_err(readable)?;
    if deployment.spec.as_ref().and_then(|spec| spec.replicas) == Some(0) {
        let remedy = format!(
            "kubectl scale deployment {} --namespace {} --replicas 1",
            target.name(),
            target.namespace
        );
        return Ok(Found::failed("the Deployment is scaled to 0", remedy));
    }
    let Some(state) = wait::unavailable(&deployment) else {
        let available = deployment.status.and_then(|status| status.available_replicas).unwrap_or(0);
        return Ok(Found::passed(format!("{available}")));
    };
    let reason = wait::pod_problem(connection, target).await.unwrap_or_default();
    let detail = format!("{state}{reason}");
    let remedy = format!("see `kubectl describe pods --namespace {}`", target.namespace);
    let serves = deployment.status.and_then(|status| status.available_replicas).unwrap_or(0) > 0;
    Ok(if serves { Found::warned(detail, remedy) } else { Found::failed(detail, remedy) })
}

async fn restarts(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let api: Api<Pod> = Api::namespaced(connection.client(), &target.namespace);
    let labels = format!("{MANAGED_BY}={MANAGER},{REVISION}={}", target.revision);
    let now = SystemTime::now();
    let mut recent = Vec::new();
    for pod in list(&api, ListParams::default().labels(&labels)).await? {
        let name = pod.name_any();
        let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
        for ended in statuses.into_iter().filter_map(|status| status.last_state?.terminated) {
            let at = ended.finished_at.map_or(now, |time| SystemTime::from(time.0));
            if now.duration_since(at).is_ok_and(|age| age < RECENT) {
                let reason = ended.reason.unwrap_or_default();
                recent.push(format!("{name} (exit code {}, {reason})", ended.exit_code));
            }
        }
    }
    if recent.is_empty() {
        return Ok(Found::passed(""));
    }
    let remedy = format!("see `kubectl logs --previous --namespace {} POD`", target.namespace);
    Ok(Found::warned(format!("restarted within the last hour: {}", named(&recent)), remedy))
}

async fn endpoints(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let service = target.service();
    Ok(match ready_endpoints(connection, &target.namespace, &service).await? {
        0 => Found::failed(
            format!("no pod of Service {}/{service} is ready", target.namespace),
            "sidecars get no configuration and no certificates until one is; see the log of the control plane",
        ),
        count => Found::passed(format!("{count}")),
    })
}

async fn leader(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let api: Api<Lease> = Api::namespaced(connection.client(), &target.namespace);
    let lease = api.get_opt(LEASE).await.map_err(readable)?.and_then(|lease| lease.spec);
    let held = lease.and_then(|spec| Some((spec.holder_identity?, spec.renew_time?)));
    let remedy = "without a leader, roots are not rotated and statuses are not written; see the log of the control plane";
    let Some((holder, renewed)) = held.filter(|(holder, _)| !holder.is_empty()) else {
        return Ok(Found::failed(format!("Lease {}/{LEASE} has no holder", target.namespace), remedy));
    };
    let age = SystemTime::now().duration_since(SystemTime::from(renewed.0)).unwrap_or_default();
    Ok(match age > STALE_LEASE {
        true => Found::failed(format!("{holder} has not renewed the Lease for {} s", age.as_secs()), remedy),
        false => Found::passed(holder),
    })
}
