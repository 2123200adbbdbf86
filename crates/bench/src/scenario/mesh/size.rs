//! Sizes of a scenario of a mesh: number and duration of turns, the meshes of the size, and their scale.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::format::{MeshCase, MeshInput};
use crate::{
    graph::{GraphDeployment, MeshPolicies},
    scenario::{
        document::{Checked, ensure, within},
        format::SizeName,
    },
};

/// Maximum number of connections of the client.
pub(super) const MAX_CONNECTIONS: f64 = 8_192.0;

/// Number and duration of turns, and size of the meshes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MeshSize {
    pub(super) rounds: u32,
    /// Duration of the measurement in each turn, in seconds.
    pub(super) seconds: f64,
    /// Duration of the load before the measurement, in seconds.
    pub(super) warmup: f64,
    /// Maximum rate of the client. Absent: those of the meshes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rate: Option<u32>,
    /// Replaces the graphs of all meshes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) graph: Option<String>,
    /// Names of the meshes that are measured. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) only: Option<Vec<String>>,
    /// Values of meshes that differ from those of the scenario, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) meshes: BTreeMap<String, SizedMesh>,
}

/// Values of a mesh in a size. Absent: those of the scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SizedMesh {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) graph: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rate: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    connections: Option<u32>,
}

impl MeshSize {
    /// Returns a mesh of the scenario in this size.
    pub(super) fn of(&self, mesh: &MeshInput) -> MeshInput {
        let sized = self.meshes.get(&mesh.name);
        let graph = sized.and_then(|sized| sized.graph.as_ref()).or(self.graph.as_ref());
        let rate = sized.and_then(|sized| sized.rate).unwrap_or(mesh.rate);
        MeshInput {
            graph: graph.unwrap_or(&mesh.graph).clone(),
            rate: rate.min(self.rate.unwrap_or(u32::MAX)),
            connections: sized.and_then(|sized| sized.connections).unwrap_or(mesh.connections),
            ..mesh.clone()
        }
    }

    /// Returns true if the mesh of this name is measured.
    pub(super) fn has(&self, mesh: &str) -> bool {
        self.only.as_ref().is_none_or(|names| names.iter().any(|name| name == mesh))
    }

    /// Checks the names and values of meshes. `field` is that of the size.
    pub(super) fn check(&self, field: &str, meshes: &[MeshInput]) -> Checked {
        let names: Vec<&str> = meshes.iter().map(|mesh| mesh.name.as_str()).collect();
        let known = |field: &str, name: &str| {
            ensure(names.contains(&name), field, || format!("must be one of {}", names.join(", ")))
        };
        for (index, name) in self.only.iter().flatten().enumerate() {
            known(&format!("{field}.only[{index}]"), name)?;
        }
        ensure(self.only.as_ref().is_none_or(|names| !names.is_empty()), &format!("{field}.only"), || {
            "must name a mesh, or be left out".to_owned()
        })?;
        for (name, mesh) in &self.meshes {
            let field = format!("{field}.meshes.{name}");
            known(&field, name)?;
            within(&format!("{field}.rate"), f64::from(mesh.rate.unwrap_or(1)), 1.0, 1e5)?;
            let connections = f64::from(mesh.connections.unwrap_or(1));
            within(&format!("{field}.connections"), connections, 1.0, MAX_CONNECTIONS)?;
        }
        Ok(())
    }
}

/// Returns the scale of a result beside that of another size of its scenario; `None` if the other is not larger. The scale
/// is that of the mesh with the most pods: their number, and the rate of the client.
pub(super) fn scale(name: SizeName, of_size: &[MeshCase], of_result: &[MeshCase]) -> Option<String> {
    let largest = |cases: &[MeshCase]| {
        let mut pods_of: BTreeMap<String, u64> = BTreeMap::new();
        for MeshCase { mesh, .. } in cases {
            if !pods_of.contains_key(&mesh.graph) {
                let made = GraphDeployment::new(&mesh.graph, MeshPolicies::default()).ok()?;
                pods_of.insert(mesh.graph.clone(), made.pods);
            }
        }
        cases.iter().map(|case| (pods_of[&case.mesh.graph], case.mesh.rate)).max()
    };
    let ((there, rate_there), (here, rate_here)) = (largest(of_size)?, largest(of_result)?);
    let share = |here: f64, there: f64| {
        if here < there { format!(" (1/{:.1})", there / here) } else { String::new() }
    };
    (there > here).then(|| {
        format!(
            "Scale of the size {name}: at most {there} pods, and {rate_there} requests/s of the client to them. Scale here: \
             {here} pods{}, and {rate_here} requests/s{}.",
            share(here as f64, there as f64),
            share(f64::from(rate_here), f64::from(rate_there))
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(graph: &str, rate: u32) -> MeshCase {
        let mesh = serde_json::json!({"name": "a", "graph": graph, "rate": rate, "connections": 1});
        serde_json::from_value(serde_json::json!({"name": "a/none", "mesh": mesh, "peer": null})).unwrap()
    }

    #[test]
    fn a_size_replaces_values_of_its_meshes() {
        let size: MeshSize = serde_json::from_str(
            r#"{"rounds": 1, "seconds": 1, "warmup": 1, "rate": 300, "meshes": {"a": {"rate": 500, "connections": 9}}}"#,
        )
        .unwrap();
        let mesh = size.of(&case("demo", 100).mesh);
        assert_eq!((mesh.rate, mesh.connections, &*mesh.graph), (300, 9, "demo"));
        let other = MeshInput { name: "b".to_owned(), ..mesh };
        assert_eq!(size.of(&MeshInput { rate: 100, ..other.clone() }).rate, 100);
        let (field, reason) = size.check("sizes.full", &[other]).unwrap_err();
        assert_eq!((&*field, &*reason), ("sizes.full.meshes.a", "must be one of b"));
    }

    #[test]
    fn the_scale_is_that_of_the_largest_mesh() {
        let here = [case("demo --copies 1", 10), case("demo --copies 4", 160)];
        let there = [case("demo --copies 30", 8_000)];
        let full = SizeName::parse("full").unwrap();
        let text = scale(full, &there, &here).unwrap();
        assert_eq!(
            text,
            "Scale of the size full: at most 302 pods, and 8000 requests/s of the client to them. Scale here: 42 pods (1/7.2), \
             and 160 requests/s (1/50.0)."
        );
        assert_eq!(scale(full, &here, &there), None);
    }
}
