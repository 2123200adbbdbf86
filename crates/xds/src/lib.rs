//! The wire: Envoy's xDS types and both ends of the discovery protocol
