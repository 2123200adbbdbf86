//! Tests of the publisher: properties of random changes ([`property`]), limits, and slow or panicking compilations.

mod nodes;
mod property;
mod refusals;
mod registrations;
mod scopes;
mod secrets;
mod views;

use std::{
    collections::BTreeSet,
    sync::{LazyLock, atomic::Ordering::Relaxed},
};

use skysail_model::{ClientScope, ProxyNode, ProxyView, api::kube::Locality};
use skysail_xds::{Changes, Kind, Resource, Snapshot, client::Form, server::ResourceFeed};
use tokio::runtime::Runtime;

use super::{admission::Connected, *};
use crate::metrics::Limit;

/// Runtime of the compilations.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

type Bodies = BTreeMap<(Kind, Arc<str>), Arc<Resource>>;

/// Limits of scopes and views that few clients reach.
const LIMITS: ScopeLimits =
    ScopeLimits { scopes: 20, scopes_per_identity: 6, views: 400, views_per_identity: 300 };

fn publisher(compiler: Compiler, limits: ScopeLimits) -> Publisher {
    let settings = PublishSettings {
        cluster_id: "Kubernetes".into(),
        generated: None,
        access_log: String::new(),
        limits,
    };
    Publisher::new(Arc::default(), settings, compiler)
}

fn bodies(snapshot: &Snapshot) -> Bodies {
    let all = Kind::ALL.into_iter().flat_map(|kind| snapshot.iter(kind));
    all.map(|resource| ((resource.kind, Arc::clone(&resource.name)), Arc::clone(resource))).collect()
}

/// Returns the names of the resources that differ.
fn differences(one: &Bodies, other: &Bodies) -> Vec<String> {
    let names: BTreeSet<_> = one.keys().chain(other.keys()).collect();
    let differ = names.into_iter().filter(|name| one.get(*name) != other.get(*name));
    differ.map(|(kind, name)| format!("{kind} {name}")).collect()
}

/// Returns the names of the resources that a client with this generation receives.
fn sent(snapshot: &Snapshot, since: u64) -> BTreeSet<String> {
    let of_kind = |kind| {
        let Changes { resources, removed } = snapshot.changes(kind, since);
        let names = resources.into_iter().map(|resource| Arc::clone(&resource.name)).chain(removed.unwrap());
        names.map(move |name| format!("{kind} {name}")).collect::<Vec<_>>()
    };
    Kind::ALL.into_iter().flat_map(of_kind).collect()
}

#[test]
fn new_roots_count_as_a_publication() {
    let publisher = publisher(Compiler::default(), LIMITS);
    // Only with roots that are bound to trust domains do resources have the mesh's own.
    let authority = skysail_identity::Authority::ephemeral().unwrap();
    let mesh = format!("caCertificates: [{{pem: {:?}, trustDomains: [other]}}]", authority.roots_pem());
    let text = format!(
        "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: istio, namespace: istio-system}}, data: {{mesh: {mesh:?}}}}}"
    );
    scopes::put(&publisher, "mesh", &text);
    for (roots, publications) in [("one", 2), ("one", 2), ("other", 3)] {
        publisher.set_roots(roots);
        assert_eq!(publisher.metrics.publications.load(Relaxed), publications);
    }
}
