//! Certificates: authority, signing requests, tokens, SPIFFE verification, TLS configurations
