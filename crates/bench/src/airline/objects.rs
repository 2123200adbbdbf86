//! Objects of the airline example for a variant of the mesh. They are those of `examples/airline` and of its ingress
//! gateway, with a client in place of the traffic generator.

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Files of the examples.
const FILES: [&str; 4] = [
    include_str!("../../../../examples/airline/namespace.yaml"),
    include_str!("../../../../examples/airline/services.yaml"),
    include_str!("../../../../examples/airline/mesh.yaml"),
    include_str!("../../../../examples/airline-ingress/ingress.yaml"),
];
const NAMESPACE: &str = "airline";
/// Deployment of the gateway.
const GATEWAY: &str = "ingress";
/// Deployment of the client.
pub(super) const CLIENT: &str = "client";

/// Parts of the mesh that are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AirlineVariant {
    /// No mesh. The client calls the services.
    None,
    /// A gateway between the client and the services, which have no sidecars.
    IngressOnly,
    /// The gateway, and sidecars that use mutual TLS with each other. No policies.
    NoPolicy,
    /// The same with the policies of the example: mutual TLS is required, and access is restricted.
    Full,
}

/// Objects of a variant.
pub(super) struct AirlineObjects {
    /// Objects as YAML.
    pub(super) yaml: String,
    /// Deployments with a sidecar or a gateway, as NAMESPACE/NAME.
    pub(super) with_sidecars: Vec<String>,
    has_gateway: bool,
}

impl AirlineVariant {
    pub(crate) const ALL: [Self; 4] = [Self::None, Self::IngressOnly, Self::NoPolicy, Self::Full];

    /// Returns the name in cases.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::IngressOnly => "ingress-only",
            Self::NoPolicy => "no-policy",
            Self::Full => "full",
        }
    }

    fn has_sidecars(self) -> bool {
        matches!(self, Self::NoPolicy | Self::Full)
    }

    /// Returns true if an object is part of the variant.
    fn has(self, object: &Value) -> bool {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let is_of_gateway = text("/metadata/name") == GATEWAY;
        match text("/apiVersion").split('/').next().unwrap_or_default() {
            "security.istio.io" => self == Self::Full,
            "networking.istio.io" => self.has_sidecars() || is_of_gateway && self != Self::None,
            _ => !is_of_gateway || self != Self::None,
        }
    }
}

impl AirlineObjects {
    /// Returns the objects. `database` is the URL of PostgreSQL; without it the services have embedded databases.
    pub(super) fn new(variant: AirlineVariant, database: Option<&str>) -> anyhow::Result<Self> {
        let mut objects = Vec::new();
        for document in FILES.iter().flat_map(|text| skysail_yaml::documents(text)) {
            let root =
                document.root.map_err(|error| anyhow::anyhow!("line {}: {}", error.line, error.message))?;
            objects.push(root.to_json());
        }
        objects.retain(|object| variant.has(object));
        let mut with_sidecars = Vec::new();
        for object in &mut objects {
            let kind = object["kind"].as_str().unwrap_or_default().to_owned();
            let name = object["metadata"]["name"].as_str().context("an object has no name")?.to_owned();
            if kind == "Namespace" && !variant.has_sidecars() {
                object["metadata"]["labels"] = json!({"istio-injection": "disabled"});
            }
            for route in object.pointer_mut("/spec/http").and_then(Value::as_array_mut).into_iter().flatten()
            {
                // A slow machine must not refuse calls.
                route.as_object_mut().map(|route| route.remove("timeout"));
            }
            if kind != "Deployment" {
                continue;
            }
            if variant.has_sidecars() || name == GATEWAY {
                with_sidecars.push(format!("{NAMESPACE}/{name}"));
            }
            let container = object.pointer_mut("/spec/template/spec/containers/0");
            set_environment(container.context("a Deployment has no container")?, database);
        }
        objects.push(client());
        let yaml = objects.iter().map(|object| format!("---\n{object}\n")).collect();
        Ok(Self { yaml, with_sidecars, has_gateway: variant != AirlineVariant::None })
    }

    /// Returns the address at which the client calls a service.
    pub(super) fn url(&self, service: &str) -> String {
        let (name, port) = if self.has_gateway { (GATEWAY, 8080) } else { (service, 9080) };
        format!("http://{name}.{NAMESPACE}:{port}")
    }
}

/// Lets both Deployments of flight respond alike, because their shares of the calls differ between variants, and names
/// the database.
fn set_environment(container: &mut Value, database: Option<&str>) {
    let Some(environment) = container["env"].as_array_mut() else { return };
    for variable in environment.iter_mut().filter(|variable| variable["name"] == "FLIGHT_VERSION") {
        variable["value"] = json!("v1");
    }
    environment.extend(database.map(|url| json!({"name": "DATABASE", "value": url})));
}

/// Returns a pod without a sidecar, in whose network the load runs.
fn client() -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": CLIENT, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": {"app": CLIENT}},
            "template": {
                "metadata": {"labels": {"app": CLIENT, "sidecar.istio.io/inject": "false"}},
                "spec": {"containers": [{
                    "name": CLIENT,
                    "image": "skysail/client:1",
                    "ports": [{"containerPort": 9080}],
                }]},
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_has_its_objects() {
        let of = |variant: AirlineVariant| AirlineObjects::new(variant, None).unwrap();
        for (variant, sidecars, policies, routes) in [
            (AirlineVariant::None, 0, 0, 0),
            (AirlineVariant::IngressOnly, 1, 0, 1),
            (AirlineVariant::NoPolicy, 7, 0, 2),
            (AirlineVariant::Full, 7, 2, 2),
        ] {
            let AirlineObjects { yaml, with_sidecars, .. } = of(variant);
            assert_eq!(with_sidecars.len(), sidecars, "{with_sidecars:?}");
            let number = |text: &str| yaml.matches(text).count();
            assert_eq!(
                (number("security.istio.io/"), number(r#""kind":"VirtualService""#)),
                (policies, routes)
            );
            assert!(!yaml.contains("traffic.airline") && !yaml.contains(r#""value":"v2""#), "{yaml}");
        }
        assert_eq!(of(AirlineVariant::None).url("auth"), "http://auth.airline:9080");
        assert_eq!(of(AirlineVariant::Full).url("auth"), "http://ingress.airline:8080");
        let with_database = AirlineObjects::new(AirlineVariant::Full, Some("postgresql://x/y")).unwrap();
        assert_eq!(with_database.yaml.matches("postgresql://x/y").count(), 5, "all but main and the gateway");
    }
}
