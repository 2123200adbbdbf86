//! Fuzzes `skysail_fuzz::certificate`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::certificate(data));
