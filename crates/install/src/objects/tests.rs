use std::collections::BTreeSet;

use k8s_openapi::{
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        apps::v1::Deployment,
        autoscaling::v2::HorizontalPodAutoscaler,
        core::v1::{Namespace, Service, ServiceAccount},
        policy::v1::PodDisruptionBudget,
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use serde::{Serialize, de::DeserializeOwned};

use super::*;
use crate::settings::Validation;

fn installation(revision: &str, replicas: Option<u32>) -> Installation {
    Installation {
        target: Target::new("istio-system", revision).unwrap(),
        control_image: "localhost/skysaild:1".into(),
        proxy_image: "localhost/skysail-proxy:1".into(),
        cni: false,
        validation: Validation::Ignore,
        deploys_gateways: true,
        replicas,
        arguments: vec!["--cert-ttl=12h".into()],
        plain_port: Some(15_010),
    }
}

/// Returns an object as the type of its kind writes it. Fields that the type does not have are lost.
fn typed(value: &Value) -> Value {
    fn round<T: Serialize + DeserializeOwned>(value: &Value) -> Value {
        serde_json::to_value(serde_json::from_value::<T>(value.clone()).unwrap()).unwrap()
    }
    match value["kind"].as_str().unwrap() {
        "Namespace" => round::<Namespace>(value),
        "ServiceAccount" => round::<ServiceAccount>(value),
        "ClusterRole" => round::<ClusterRole>(value),
        "ClusterRoleBinding" => round::<ClusterRoleBinding>(value),
        "Role" => round::<Role>(value),
        "RoleBinding" => round::<RoleBinding>(value),
        "Service" => round::<Service>(value),
        "Deployment" => round::<Deployment>(value),
        "PodDisruptionBudget" => round::<PodDisruptionBudget>(value),
        "HorizontalPodAutoscaler" => round::<HorizontalPodAutoscaler>(value),
        "MutatingWebhookConfiguration" => round::<MutatingWebhookConfiguration>(value),
        "ValidatingWebhookConfiguration" => round::<ValidatingWebhookConfiguration>(value),
        "CustomResourceDefinition" => round::<CustomResourceDefinition>(value),
        other => panic!("{other}"),
    }
}

/// Returns a value with the numbers of a schema as the types of Kubernetes write them.
fn widened(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(widened).collect(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match value.as_f64().filter(|_| name == "minimum") {
                Some(number) => (name.clone(), number.into()),
                None => (name.clone(), widened(value)),
            })
            .collect(),
        other => other.clone(),
    }
}

#[test]
fn all_fields_are_those_of_kubernetes() {
    for installation in [installation("default", None), installation("canary", Some(2))] {
        for object in objects(&installation) {
            assert!(typed(object.value()) == widened(object.value()), "{object}");
        }
    }
}

#[test]
fn revisions_share_only_the_namespace_and_definitions() {
    let names = |revision| {
        let objects = objects(&installation(revision, None)).into_iter();
        objects.map(|object| object.to_string()).collect::<BTreeSet<_>>()
    };
    let (default, canary) = (names("default"), names("canary"));
    let shared: Vec<_> = default.intersection(&canary).collect();
    let definition = "CustomResourceDefinition ratelimitpolicies.skysail.io";
    assert_eq!(shared, [definition, "Namespace istio-system"]);
    assert_eq!(default.len(), canary.len());
}

#[test]
fn the_control_plane_may_watch_what_it_reads_and_no_workloads() {
    let objects = objects(&installation("default", None));
    let role = objects.iter().find(|object| object.kind == ObjectKind::CLUSTER_ROLE).unwrap();
    let rules = role.value()["rules"].as_array().unwrap();
    let may = |verb: &str, group: &str, resource: &str| {
        rules.iter().any(|rule| {
            let has = |list: &str, wanted: &str| {
                rule[list].as_array().is_some_and(|list| list.iter().any(|one| *one == wanted))
            };
            has("verbs", verb) && has("apiGroups", group) && has("resources", resource)
        })
    };
    for (group, resource) in [
        ("", "namespaces"),
        ("", "pods"),
        ("discovery.k8s.io", "endpointslices"),
        ("networking.k8s.io", "ingressclasses"),
        ("networking.istio.io", "serviceentries"),
        ("networking.istio.io", "gateways"),
        ("security.istio.io", "authorizationpolicies"),
        ("telemetry.istio.io", "telemetries"),
        ("gateway.networking.k8s.io", "gateways"),
        ("gateway.networking.k8s.io", "backendtlspolicies"),
        ("skysail.io", "ratelimitpolicies"),
    ] {
        assert!(may("list", group, resource) && may("watch", group, resource), "{group} {resource}");
    }
    assert!(may("create", "", "configmaps") && !may("create", "", "secrets") && !may("update", "", "pods"));
    assert!(may("patch", "gateway.networking.k8s.io", "httproutes/status"));
    let writes = rules.iter().filter(|rule| !rule["resourceNames"].is_null());
    let writes: BTreeSet<_> = writes.map(|rule| rule["resourceNames"].to_string()).collect();
    let names = ["istio-ca-root-cert", "skysail-injector", "skysail-validator"];
    assert_eq!(writes, names.map(|name| format!("[\"{name}\"]")).into());
    assert!(!may("list", "apps", "deployments") && may("create", "apps", "deployments"));
    let without = Installation { deploys_gateways: false, ..installation("default", None) };
    assert!(!self::objects(&without).iter().any(|object| object.value().to_string().contains("\"apps\"")));
}

#[test]
fn replicas_are_fixed_or_scaled() {
    let has_autoscaler = |objects: &[Object]| objects.iter().any(|one| one.kind == ObjectKind::AUTOSCALER);
    let replicas = |objects: &[Object]| {
        let deployment = objects.iter().find(|one| one.kind == ObjectKind::DEPLOYMENT).unwrap();
        deployment.value()["spec"]["replicas"].as_u64()
    };
    let scaled = objects(&installation("default", None));
    let fixed = objects(&installation("default", Some(3)));
    assert_eq!((has_autoscaler(&scaled), replicas(&scaled)), (true, None));
    assert_eq!((has_autoscaler(&fixed), replicas(&fixed)), (false, Some(3)));
}
