//! Objects in YAML that many meshes of tests have.

/// Returns a Service with port 80 for the pods with the label `app: NAME`.
pub fn service(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n\
         spec: {{selector: {{app: {name}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n"
    )
}

/// Returns a Pod with the label `app: NAME`, in which the echo server listens on port 8080.
pub fn pod(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: {name}}}}}\n\
         spec: {{containers: [{{name: c, image: registry.example/{name}, ports: [{{containerPort: 8080}}]}}]}}\n"
    )
}
