export const { crypto } = globalThis;
