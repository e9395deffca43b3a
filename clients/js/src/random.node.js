export { webcrypto as crypto } from "node:crypto"; // Node 18 has no global one.
