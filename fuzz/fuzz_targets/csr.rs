//! Fuzzes `skysail_fuzz::csr`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::csr(data));
