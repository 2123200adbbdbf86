use std::fs;

use super::*;

/// Reads these files, of which the first is the test.
fn read(files: &[(&str, &str)], overrides: &[(&str, &str)]) -> anyhow::Result<ClusterSize> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let overrides = overrides.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    ClusterSize::read(&folder.path().join(files[0].0), &overrides)
}

#[test]
fn a_cluster_of_pilot_load_has_a_size() {
    let cluster = "
jitter: {workloads: 1s, config: 0s}
nodes: [{name: node, count: 4}]
namespaces:
- name: mesh
  replicas: 3
  applications:
  - {name: wide, replicas: 2, pods: 10}
  - {name: tall, replicas: 5, instances: 1, configs: [sidecar]}
  - {name: plain, type: plain, pods: 4}
- name: edge
  applications: [{name: ingress, type: gateway, pods: 2}]
";
    let size = read(&[("cluster.yaml", cluster)], &[]).unwrap();
    let unused = ["jitter", "namespaces.applications.configs"].map(str::to_owned).to_vec();
    // Pods: 3 × (20 + 5 + 4) + 2, without sidecars 3 × 4.
    let expected = ClusterSize { namespaces: 4, services: 25, pods: 89, sidecars: 77, churn: 0, unused };
    assert_eq!(size, expected);
    assert_eq!(size.endpoints(), 4);
}

const TEST: &str = "
name: churn
{{$namespaces := DefaultParam .CL2_NAMESPACES 4}}
{{$size:= 5}} {{- /* pods of a Deployment */ -}}
{{$deployments := MultiplyInt .Nodes 30 | DivideInt (MultiplyInt 36000 $namespaces $size) | DivideInt 36000}}
namespace: {number: {{$namespaces}}}
steps:
- name: services
  phases:
  - namespaceRange: {min: 1, max: {{$namespaces}}}
    replicasPerNamespace: 2
    tuningSet: default
    objectBundle: [{basename: service, objectTemplatePath: service.yaml}]
{{range $round := Loop 2}}
{{range $share := Loop 2}}
- name: round {{$round}}
  phases:
  - namespaceRange: {min: 1, max: {{$namespaces}}}
    replicasPerNamespace: {{if eq $share 0}}{{$deployments}}{{else}}{{DivideInt $deployments 2}}{{end}}
    objectBundle:
    - basename: workload
      objectTemplatePath: workload.yaml
      templateFillMap: {Replicas: {{$size}}}
{{end}}
{{end}}
- {name: wait, measurements: [{Method: Sleep}]}
";
const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: {{.Name}}}\n";
const WORKLOAD: &str = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: {{.Name}}}\n\
                        spec: {replicas: {{.Replicas}}, labels: {{if .CL2_LABELS}}yes{{else}}no{{end}}}\n";

#[test]
fn a_test_of_cluster_loader_has_a_size() {
    let files = [("test.yaml", TEST), ("service.yaml", SERVICE), ("workload.yaml", WORKLOAD)];
    let size = read(&files, &[("Nodes", "4")]).unwrap();
    // 120 pods in 4 namespaces: 6 Deployments of 5 in each, of which 3 go and come again.
    let unused = vec!["steps.measurements".to_owned()];
    let expected = ClusterSize { namespaces: 4, services: 8, pods: 120, sidecars: 120, churn: 50, unused };
    assert_eq!(size, expected);
    let size = read(&files, &[("Nodes", "4"), ("CL2_NAMESPACES", "2")]).unwrap();
    assert_eq!((size.namespaces, size.services, size.pods), (2, 4, 120));
}

#[test]
fn files_that_cannot_be_used_have_a_reason() {
    let of = |text: &str| format!("{:#}", read(&[("file.yaml", text)], &[]).unwrap_err());
    for (text, reason) in [
        ("name: x\n", "neither `namespaces`, as in pilot-load, nor `steps`, as in ClusterLoader2"),
        ("namespaces: [{name: a}]\n", "the file describes no pod"),
        ("namespaces: [{replicas: -1, applications: [{}]}]\n", "replicas: -1 is not a number"),
        ("namespaces: [{replicas: 1000000, applications: [{replicas: 1000000}]}]\n", "too many objects"),
        ("namespaces: [{applications: [{type: waypoint}]}]\n", "\"waypoint\" is none of"),
        ("namespaces: [{applications: [{pods: {{RandInt 5}}}]}]\n", "function RandInt: it is not supported"),
        ("a: {{.A.B}}\n", ".A.B: this part of a template is not supported"),
        ("a: {{$b}}\n", "$b is not set"),
        ("{{if true}}\n", "an `if` without its `end`"),
        ("{{range $i := Loop 1000000}}{{end}}\n", "not a number from 0 to 10000"),
        ("{{range Loop 9999}}{{range Loop 9999}}x{{end}}{{end}}\n", "more than 1000000 parts"),
        ("a: {{\n", "`{{` without `}}`"),
        (&"{{if true}}".repeat(100), "more than 32 blocks"),
        (&format!("{{{{not {}1{}}}}}", "(".repeat(100), ")".repeat(100)), "more than 32 parentheses"),
        (
            "steps: [{phases: [{replicasPerNamespace: 1, objectBundle: [{objectTemplatePath: none.yaml}]}]}]\n",
            "none.yaml: No such file",
        ),
    ] {
        assert!(of(text).contains(reason), "{text}: {}", of(text));
    }
}
