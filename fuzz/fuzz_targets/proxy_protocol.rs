//! Fuzzes `skysail_fuzz::proxy_protocol`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::proxy_protocol(data));
