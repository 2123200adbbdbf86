//! Injection of sidecars into pods. The webhook of skysaild and `skysail inject` use the same function.
//!
//! | Step | Module |
//! |---|---|
//! | Documents and workloads of a file; AdmissionReview | `documents`, `admission` |
//! | Whether a pod gets a sidecar | `decision` |
//! | The pod with its sidecar | `pod` (by a `plan`) |
//! | Containers and volumes | `sidecar`, `traffic` (interception), `probes`, `scrape` (Prometheus) |
//! | Settings, annotations, merging of objects, YAML | `settings`, `annotations`, `merge`, `text` |
//!
//! Labels, annotations, names of containers, volumes and variables are those of Istio's injector, so that tools for
//! Istio recognise the result. Source: istio/pkg/kube/inject and the chart's `injection-template.yaml`.

mod admission;
mod annotations;
mod decision;
mod documents;
mod merge;
mod plan;
mod pod;
mod probes;
mod scrape;
mod settings;
mod sidecar;
mod text;
mod traffic;

pub use admission::{ReviewError, answer, review};
pub use decision::{Decision, NamespaceLabels, SYSTEM_NAMESPACES, decide};
pub use documents::{DocumentError, InjectedText, Namespaces, inject_text, namespaces_in};
pub use plan::{InjectError, Owner};
pub use pod::{Injected, inject};
pub use settings::{Interceptor, MeshSettingsError, Settings};
pub use text::yaml;
