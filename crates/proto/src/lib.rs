//! Messages of Envoy, Istio and OpenTelemetry, and their encoding.
//!
//! prost's decoders and encoders are generic over the buffer, so each crate that calls them compiles them
//! again. [`Codec`] compiles them once, here; other crates call it instead of `prost::Message`.

mod codec;
pub mod istio;
pub mod otlp;

pub use codec::Codec;
pub use envoy_types as envoy;
pub use prost::DecodeError;
