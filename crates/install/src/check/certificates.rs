//! Checks of the root certificates that sidecars trust.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime},
};

use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::{Api, ResourceExt as _, api::ListParams};
use skysail_identity::{Roots, not_after};
use skysail_inject::SYSTEM_NAMESPACES;

use super::{Category, Checks, Found, list, named};
use crate::{
    connection::{Connection, readable},
    objects::ROOTS,
    settings::Target,
};

const CATEGORY: Category = Category::Certificates;
/// Key of the certificates in the ConfigMap.
const KEY: &str = "root-cert.pem";
const DAY: Duration = Duration::from_hours(24);
/// Remaining validity that leaves time for a rotation.
const ENOUGH: Duration = Duration::from_hours(60 * 24);

/// Makes the checks of the certificates.
pub(super) async fn check(connection: &Connection, target: &Target, checks: &mut Checks<'_>) {
    checks.make(CATEGORY, "the root certificates are valid for 60 days", validity(connection, target)).await;
    checks
        .make(CATEGORY, "all namespaces have the root certificates", distribution(connection, target))
        .await;
}

/// Returns the root certificates of a namespace (PEM), if it has them.
pub(super) async fn roots(connection: &Connection, namespace: &str) -> anyhow::Result<Option<String>> {
    let api: Api<ConfigMap> = Api::namespaced(connection.client(), namespace);
    Ok(api.get_opt(ROOTS).await.map_err(readable)?.and_then(pem))
}

fn pem(map: ConfigMap) -> Option<String> {
    map.data?.remove(KEY)
}

async fn validity(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    match roots(connection, &target.namespace).await? {
        Some(pem) => validity_of(&pem, SystemTime::now()),
        None => Ok(Found::failed(
            format!("there is no ConfigMap {}/{ROOTS} with key {KEY}", target.namespace),
            "the control plane makes it; see its log",
        )),
    }
}

fn validity_of(pem: &str, now: SystemTime) -> anyhow::Result<Found> {
    let roots = Roots::from_pem(pem.as_bytes())?;
    // A root that is not used any more may expire, but the last one must not.
    let mut last = SystemTime::UNIX_EPOCH;
    for certificate in roots.certificates() {
        last = last.max(not_after(certificate)?);
    }
    let remedy = "rotate them with `skysail ca rotate`, or replace the plugged-in authority";
    Ok(match last.duration_since(now) {
        Err(_) => Found::failed("they have expired", remedy),
        Ok(left) if left < ENOUGH => {
            Found::warned(format!("{} days", left.as_secs() / DAY.as_secs()), remedy)
        }
        Ok(left) => Found::passed(format!("{} days", left.as_secs() / DAY.as_secs())),
    })
}

async fn distribution(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let namespaces: Api<Namespace> = Api::all(connection.client());
    let ends = |namespace: &Namespace| namespace.metadata.deletion_timestamp.is_some();
    let wanted: BTreeSet<String> = list(&namespaces, ListParams::default())
        .await?
        .iter()
        .filter(|namespace| !ends(namespace))
        .map(Namespace::name_any)
        .filter(|name| !SYSTEM_NAMESPACES.contains(&name.as_str()))
        .collect();
    let api: Api<ConfigMap> = Api::all(connection.client());
    let maps = list(&api, ListParams::default().fields(&format!("metadata.name={ROOTS}"))).await?;
    let own = roots(connection, &target.namespace).await?;
    let mut equal = BTreeSet::new();
    for map in maps {
        let namespace = map.namespace().unwrap_or_default();
        if pem(map) == own {
            equal.insert(namespace);
        }
    }
    let lacking: Vec<String> = wanted.difference(&equal).cloned().collect();
    Ok(match lacking.is_empty() {
        true => Found::passed(format!("{} namespaces", wanted.len())),
        false => Found::failed(
            format!("absent or different in {}", named(&lacking)),
            "sidecars there do not trust the control plane; its log says what prevents the change, such as another \
             control plane that writes the same ConfigMap",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Verdict;

    #[test]
    fn the_last_root_decides_about_the_validity() {
        let root = |days: i64| {
            let mut params = rcgen::CertificateParams::default();
            params.not_after = rcgen::date_time_ymd(2030, 1, 1) + time::Duration::days(days);
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().pem()
        };
        let now = SystemTime::from(rcgen::date_time_ymd(2030, 1, 1));
        let verdict = |pem: &str| validity_of(pem, now).unwrap().verdict;
        assert_eq!(verdict(&root(-1)), Verdict::Failed);
        assert_eq!(verdict(&root(59)), Verdict::Warned);
        assert_eq!(verdict(&(root(-1) + &root(61))), Verdict::Passed);
        assert!(validity_of("", now).is_err());
    }
}
